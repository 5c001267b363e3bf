package dev.lesonnx.app.model

import dev.lesonnx.Telemetry
import dev.lesonnx.speculative.DraftCounts
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.update

/**
 * One generated token: the time it took, and what its experts cost. Bytes of memory are the process's. The model goes on while a
 * sample is taken, so counts of one step may lie in two samples; over many they are exact.
 */
data class TokenSample(
    val ms: Double,
    val hits: Long,
    val late: Long,
    val misses: Long,
    val readBytes: Long,
    val memoryBytes: Long,
)

/** Where the time of a token goes, in ms. */
data class TimeShares(val dense: Double, val experts: Double, val lookahead: Double, val schedule: Double, val stall: Double)

/** What the telemetry screen shows; figures are of the last [samples], means over them. [drafts]: those of the last text, null where nothing is drafted. */
data class TelemetryState(
    val samples: List<TokenSample> = emptyList(),
    val total: Telemetry = Telemetry(),
    val expertBudgetBytes: Long = 0,
    val expertBytes: Long = 0,
    val peakBytes: Long = 0,
    val times: TimeShares = TimeShares(0.0, 0.0, 0.0, 0.0, 0.0),
    val events: List<String> = emptyList(),
    val drafts: DraftCounts? = null,
) {
    val tokensPerSecond: Double get() = samples.sumOf { it.ms }.let { if (it > 0) samples.size / it * 1e3 else 0.0 }
    val readPerToken: Long get() = if (samples.isEmpty()) 0 else samples.sumOf { it.readBytes } / samples.size
    val hitRate: Double get() = rate { it.hits }
    val lateRate: Double get() = rate { it.late }

    private fun rate(of: (TokenSample) -> Long): Double {
        val all = samples.sumOf { it.hits + it.late + it.misses }
        return if (all == 0L) 0.0 else samples.sumOf(of).toDouble() / all
    }
}

/** Keeps the last tokens' figures. Samples may come from any thread, one at a time. */
class TelemetryModel {
    private val mutableState = MutableStateFlow(TelemetryState())

    val state: StateFlow<TelemetryState> = mutableState

    /** A model was loaded: figures begin anew. */
    fun reset(expertBudgetBytes: Long, expertBytes: Long) {
        mutableState.value = TelemetryState(expertBudgetBytes = expertBudgetBytes, expertBytes = expertBytes)
    }

    /** A token took [ms], between the library's counters [before] and [after]. */
    fun token(
        ms: Double,
        before: Telemetry,
        after: Telemetry,
        memoryBytes: Long,
        expertBudgetBytes: Long,
        drafts: DraftCounts? = null,
    ) = mutableState.update {
        val sample = TokenSample(
            ms = ms,
            hits = after.hits - before.hits,
            late = after.late - before.late,
            misses = after.misses - before.misses,
            readBytes = after.readBytes - before.readBytes,
            memoryBytes = memoryBytes,
        )
        val times = TimeShares(
            dense = after.denseMs - before.denseMs,
            experts = after.expertMs - before.expertMs,
            lookahead = after.lookaheadMs - before.lookaheadMs,
            schedule = after.scheduleMs - before.scheduleMs,
            stall = after.stallMs - before.stallMs,
        )
        it.copy(
            samples = (it.samples + sample).takeLast(WINDOW),
            total = after,
            expertBudgetBytes = expertBudgetBytes,
            peakBytes = maxOf(it.peakBytes, memoryBytes),
            times = it.times.towards(times),
            drafts = drafts,
        )
    }

    /** Something that a person should see beside the figures, such as memory pressure. */
    fun event(text: String) = mutableState.update { it.copy(events = (listOf(text) + it.events).take(EVENTS)) }

    private fun TimeShares.towards(next: TimeShares): TimeShares {
        // The first token sets the level, later ones move it.
        val step = if (dense == 0.0) 1.0 else STEP
        fun mix(old: Double, new: Double) = old + step * (new - old)
        return TimeShares(
            mix(dense, next.dense),
            mix(experts, next.experts),
            mix(lookahead, next.lookahead),
            mix(schedule, next.schedule),
            mix(stall, next.stall),
        )
    }

    private companion object {
        const val WINDOW = 120
        const val EVENTS = 5
        const val STEP = 0.1
    }
}
