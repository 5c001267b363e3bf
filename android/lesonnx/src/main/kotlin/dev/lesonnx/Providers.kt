package dev.lesonnx

import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtProvider
import ai.onnxruntime.OrtSession
import ai.onnxruntime.providers.NNAPIFlags
import java.util.EnumSet

/** The provider that is always there. */
internal val CPU_PROVIDER = Provider(OrtProvider.CPU.getName())

/** Stands for a directory of the host's own, one a bundle, in the value of an option. */
private const val CACHE_DIRECTORY = "{cache}"

/** What of a manifest's list of providers the installed ONNX Runtime has, and a line on each other. */
internal class InstalledProviders(val found: List<Provider>, val notes: List<String>)

/** Those of [listed] that are [available], in order, without options that need a directory. */
internal fun installedProviders(listed: List<Provider>, available: Set<String>): InstalledProviders {
    val (found, missing) = listed.partition { it.name in available }
    return InstalledProviders(
        found.map { provider -> provider.copy(options = provider.options.filterValues { CACHE_DIRECTORY !in it }) },
        missing.map { "the installed ONNX Runtime has no ${it.name}" },
    )
}

/** Makes sessions of these options run on [provider]; [BundleError] in one line where it cannot be had so. The CPU provider needs nothing. */
internal fun OrtSession.SessionOptions.use(provider: Provider) {
    try {
        when (provider.name) {
            CPU_PROVIDER.name -> return
            OrtProvider.CORE_ML.getName() -> addCoreML(provider.options)
            OrtProvider.QNN.getName() -> addQnn(provider.options)
            OrtProvider.XNNPACK.getName() -> addXnnpack(provider.options)
            OrtProvider.NNAPI.getName() -> addNnapi(nnapiFlags(provider.options))
            else -> throw BundleError("provider ${provider.name} is not known here")
        }
        // A twin of which the CPU provider would run a piece is slower than the plain part: better none.
        addConfigEntry("session.disable_cpu_ep_fallback", "1")
    } catch (error: OrtException) {
        throw BundleError("provider ${provider.name} cannot be used: ${Ort.firstLine(error)}")
    }
}

/** The flags of NNAPI, whose only option is their sum; [BundleError] for what is no such number. */
internal fun nnapiFlags(options: Map<String, String>): EnumSet<NNAPIFlags> {
    val text = options["flags"] ?: "0"
    val flags = EnumSet.noneOf(NNAPIFlags::class.java)
    val sum = text.toIntOrNull()
    val all = NNAPIFlags.entries.sumOf { it.getValue() }
    if (sum == null || sum < 0 || sum and all.inv() != 0) throw BundleError("provider ${OrtProvider.NNAPI.getName()}: flags are '$text', expected a sum of 1 to $all")
    return NNAPIFlags.entries.filterTo(flags) { sum and it.getValue() != 0 }
}
