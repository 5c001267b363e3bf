package dev.lesonnx

import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession

/** The names that [LoadOptions.accelerate] takes. */
val ACCELERATIONS: List<String> = listOf("auto", "off", "cpu")

/**
 * The twins of a bundle that can be used here, by width; none of them where the bundle or the machine has none. See `docs/bundle.md`.
 *
 * [mode] `auto`: on the providers that the manifest lists for this platform and the installed ONNX Runtime has; `off`: never; `cpu`: on
 * the CPU provider, to try them. It knows a provider's name, not the schedule nor what flows between parts: the runner does. Not
 * thread-safe; owned by a runner, which closes it. [InputError] for `cpu` where the bundle has none.
 */
internal class Twins(private val bundle: Bundle, private val platform: Platform, mode: String, private val numThreads: Int) : AutoCloseable {
    private val byWidth = sortedMapOf<Int, TwinWidth>()
    private val others = HashMap<String, OrtSession>()

    /** Why some are not used, a line each. */
    val notes: List<String> get() = lines
    private val lines = ArrayList<String>()

    val widths: Collection<TwinWidth> get() = byWidth.values

    init {
        val record = bundle.manifest.twins
        if (mode == "cpu" && record == null) throw InputError("${bundle.directory}: has no twins; export with --accelerate dense")
        if (record != null && mode != "off" && bundle.manifest.positionRows == 1) {
            try {
                open(record, if (mode == "cpu") listOf(CPU_PROVIDER) else listed(record))
            } catch (error: Throwable) {
                close()
                throw error
            }
        }
    }

    /** What attention caches must hold from the start; 0 without twins. */
    val capacityTokens: Int get() = widths.firstOrNull()?.capacityTokens ?: 0

    /** The twins that a step of that many rows may use: its width is theirs, and caches have their capacity. */
    fun forStep(numRows: Int, states: LayerStates): TwinWidth? = byWidth[numRows]?.takeIf { it.capacityTokens == states.capacityTokens }

    /** The providers to try, the best first. */
    private fun listed(record: TwinsRecord): List<Provider> {
        val names = record.parts.flatMap { it.providers[platform.target].orEmpty() }.associateBy { it.name }.values.toList()
        val installed = installedProviders(names, OrtEnvironment.getAvailableProviders().mapTo(HashSet()) { it.getName() })
        lines += installed.notes.map { "$it: dense parts run without it" }
        return installed.found
    }

    private fun open(record: TwinsRecord, providers: List<Provider>) {
        if (providers.isEmpty()) return
        for (helper in record.helpers) others.getOrPut(helper.path) { session(helper.path, CPU_PROVIDER, 1) }
        for ((rows, twins) in record.parts.groupBy { it.rows }) {
            for (provider in providers) {
                val opened = openAll(rows, twins, provider) ?: continue
                byWidth[rows] = TwinWidth(bundle.manifest, record, rows, opened, others, platform)
                break
            }
        }
    }

    /** All twins of a width on one provider; null, and a line why, where it does not take one of them. */
    private fun openAll(rows: Int, twins: List<Twin>, provider: Provider): Map<String, OrtSession>? {
        val opened = HashMap<String, OrtSession>()
        try {
            for (twin in twins) opened[twin.part] = session(twin.path, provider, numThreads)
            return opened
        } catch (error: BundleError) {
            opened.values.forEach(OrtSession::close)
            lines += "steps of $rows tokens do not use ${provider.name}: ${error.message}"
            return null
        }
    }

    private fun session(path: String, provider: Provider, numThreads: Int): OrtSession =
        Ort.sessionOptions(optimise = true, numThreads).use { options ->
            options.use(provider)
            Ort.openSession(bundle.file(path), options)
        }

    override fun close() {
        widths.forEach(TwinWidth::close)
        byWidth.clear()
        others.values.forEach(OrtSession::close)
        others.clear()
    }
}
