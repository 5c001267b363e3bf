package dev.lesonnx.app.model

import dev.lesonnx.Bundle
import dev.lesonnx.GenerationOptions
import dev.lesonnx.LesonnxError
import dev.lesonnx.LoadOptions
import dev.lesonnx.Memory
import dev.lesonnx.Model
import dev.lesonnx.Telemetry
import dev.lesonnx.speculative.DraftCounts
import dev.lesonnx.store.formatBytes
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Job
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.flow.takeWhile
import kotlinx.coroutines.flow.update
import kotlinx.coroutines.launch
import java.util.Locale

/** One rung of the ladder: each adds one technique to the one before. */
enum class Rung(val title: String, private val change: (LoadOptions) -> LoadOptions) {
    SERIAL("On demand, serial", { it.copy(schedule = "on-demand", numLoaders = 1) }),
    PARALLEL("+ parallel loads", { it.copy(schedule = "on-demand", numLoaders = LOADERS) }),
    CACHE("+ cache (LRU)", { it.copy(schedule = "cache") }),
    LES("+ LES eviction", { it.copy(schedule = "les", computeFirst = false, lookahead = false) }),
    COMPUTE_FIRST("+ compute-first", { it.copy(schedule = "les", computeFirst = true, lookahead = false) }),
    LOOKAHEAD("+ lookahead", { it.copy(schedule = "les", computeFirst = true, lookahead = true) }),
    DRAFTS("+ drafts (ngram)", { it.copy(schedule = "les", computeFirst = true, lookahead = true, draft = "ngram") }),
    ;

    /** Several rows in a pass may round otherwise than one: with drafts, a near tie may go the other way. */
    val givesSameBits: Boolean get() = this != DRAFTS

    fun options(base: LoadOptions): LoadOptions = change(base)
}

private const val LOADERS = 4

/** What a rung measured; figures are means of a token. [drafts]: those of the whole row, null where nothing is drafted. */
data class RungResult(
    val rung: Rung,
    val tokensPerSecond: Double,
    val hitRate: Double,
    val lateRate: Double,
    val readBytes: Long,
    val stallMs: Double,
    val memoryBytes: Long,
    val drafts: DraftCounts? = null,
)

/** What the benchmark screen shows. [running] is the rung at work with its share done; [setting] says on what it ran. */
data class BenchmarkState(
    val results: List<RungResult> = emptyList(),
    val running: Pair<Rung, Float>? = null,
    val isRunning: Boolean = false,
    val setting: String? = null,
    val problem: String? = null,
) {
    val isComplete: Boolean get() = results.size == Rung.entries.size

    /** The table as text, for sharing. */
    fun asText(): String = buildString {
        appendLine(setting)
        appendLine("technique, tokens/s, hits, late, read a token, waiting ms")
        for (result in results) {
            val figures = "%.2f, %.0f %%, %.0f %%".format(Locale.ROOT, result.tokensPerSecond, result.hitRate * 100, result.lateRate * 100)
            appendLine("${result.rung.title}, $figures, ${formatBytes(result.readBytes)}, ${"%.2f".format(Locale.ROOT, result.stallMs)}")
        }
        results.firstNotNullOfOrNull { it.drafts }?.let { appendLine("drafted tokens accepted: ${it.accepted.sum()} of ${it.drafted.sum()}") }
    }
}

/**
 * How long a row is measured, after [warmupTokens]: the first row for [seconds], but [leastTokens] to [mostTokens] tokens;
 * the others for as many tokens as it had, so that all did the same work.
 */
data class Span(val warmupTokens: Int = 16, val leastTokens: Int = 24, val mostTokens: Int = 256, val seconds: Double = 4.0)

/** Runs the schedules one after another on the loaded bundle: the same prompt, the same budget, and so the same tokens. */
class BenchmarkModel(
    private val host: ModelHost,
    private val scope: CoroutineScope,
    private val span: Span = Span(),
) {
    private val mutableState = MutableStateFlow(BenchmarkState())
    private var running: Job? = null

    val state: StateFlow<BenchmarkState> = mutableState

    /** Measures the loaded bundle; it is loaded again at the end as it was. Does nothing where none is, or while one runs. */
    fun run(prompt: String = PROMPT) {
        val loaded = host.state.value as? HostState.Ready ?: return
        val bundle = host.bundle ?: return
        if (mutableState.value.isRunning) return
        val budget = minOf(bundle.expertBytes, maxOf(bundle.expertBytes / BUDGET_SHARE, bundle.tokenDemandBytes))
        val setting = "${loaded.name}: ${formatBytes(budget)} of ${formatBytes(bundle.expertBytes)} of experts"
        mutableState.value = BenchmarkState(isRunning = true, setting = setting)
        running = scope.launch {
            try {
                host.alone(loaded.name) { ladder(bundle, LoadOptions(expertBudgetBytes = budget), prompt) }
            } catch (error: LesonnxError) {
                mutableState.update { it.copy(problem = error.message) }
            } finally {
                mutableState.update { it.copy(isRunning = false, running = null) }
                scope.launch { host.load(loaded.name, bundle, loaded.options) }
            }
        }
    }

    fun stop() {
        running?.cancel()
    }

    private suspend fun ladder(bundle: Bundle, base: LoadOptions, prompt: String) {
        var expected: List<Int>? = null
        var span = span
        for (rung in Rung.entries) {
            mutableState.update { it.copy(running = rung to 0f) }
            val (result, ids) = host.with(bundle, rung.options(base)) { measure(rung, it, prompt, span) }
            if (expected == null) {
                val tokens = ids.size - 1 - span.warmupTokens
                span = span.copy(leastTokens = tokens, mostTokens = tokens)
                mutableState.update { it.copy(setting = "${it.setting}, $tokens tokens a row") }
            }
            if (expected != null && ids != expected && rung.givesSameBits) {
                throw LesonnxError("${rung.title} gave other tokens than ${Rung.SERIAL.title}, expected the same")
            }
            expected = expected ?: ids
            mutableState.update { it.copy(results = it.results + result) }
        }
    }

    /** One row; gives the ids of the tokens that it ran, the prefill's first. */
    private suspend fun measure(rung: Rung, model: Model, prompt: String, span: Span): Pair<RungResult, List<Int>> {
        val first = span.warmupTokens + 1
        val options = GenerationOptions(maxNewTokens = first + span.mostTokens, ignoreEos = true)
        val ids = ArrayList<Int>()
        var before = Telemetry()
        var began = 0L
        var peak = 0L
        val generation = model.generate(prompt, options)
        generation.tokens.takeWhile { token ->
            token.id?.let(ids::add)
            if (ids.size == first) {
                before = model.telemetry
                began = System.nanoTime()
            }
            peak = maxOf(peak, Memory.currentBytes())
            mutableState.update { it.copy(running = rung to ids.size.toFloat() / (first + span.mostTokens)) }
            val measured = ids.size - first
            measured < span.leastTokens || (measured < span.mostTokens && (System.nanoTime() - began) / NS_PER_S < span.seconds)
        }.collect()
        val seconds = (System.nanoTime() - began) / NS_PER_S
        val after = model.telemetry
        val tokens = ids.size - first
        val required = (after.hits + after.late + after.misses - before.hits - before.late - before.misses).coerceAtLeast(1)
        val result = RungResult(
            rung = rung,
            tokensPerSecond = tokens / seconds,
            hitRate = (after.hits - before.hits).toDouble() / required,
            lateRate = (after.late - before.late).toDouble() / required,
            readBytes = (after.readBytes - before.readBytes) / tokens,
            stallMs = (after.stallMs - before.stallMs) / tokens,
            memoryBytes = peak,
            drafts = generation.report.drafts,
        )
        return result to ids
    }

    private companion object {
        const val PROMPT = "In the beginning"
        const val BUDGET_SHARE = 4
        const val NS_PER_S = 1e9
    }
}
