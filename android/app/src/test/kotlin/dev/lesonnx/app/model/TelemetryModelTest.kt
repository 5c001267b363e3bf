package dev.lesonnx.app.model

import dev.lesonnx.Telemetry
import dev.lesonnx.speculative.DraftCounts
import org.junit.Test
import kotlin.test.assertEquals

class TelemetryModelTest {
    private val model = TelemetryModel()
    private val state get() = model.state.value

    @Test
    fun `a token's figures are the counters' difference`() {
        val before = Telemetry(hits = 10, late = 1, misses = 5, readBytes = 1000, denseMs = 3.0, stallMs = 1.0)
        val after = before.copy(hits = 28, late = 3, misses = 9, readBytes = 5000, denseMs = 5.0, stallMs = 1.5)
        model.token(4.0, before, after, memoryBytes = 77, expertBudgetBytes = 99)
        assertEquals(TokenSample(4.0, hits = 18, late = 2, misses = 4, readBytes = 4000, memoryBytes = 77), state.samples.single())
        assertEquals(250.0, state.tokensPerSecond)
        assertEquals(0.75, state.hitRate)
        assertEquals(2 / 24.0, state.lateRate)
        assertEquals(4000, state.readPerToken)
        assertEquals(TimeShares(dense = 2.0, experts = 0.0, lookahead = 0.0, schedule = 0.0, stall = 0.5), state.times)
        assertEquals(after to 77L, state.total to state.peakBytes)
    }

    @Test
    fun `the drafts of the last text are kept`() {
        val drafts = DraftCounts(passes = 3)
        model.token(1.0, Telemetry(), Telemetry(), 1, 1, drafts)
        assertEquals(drafts, state.drafts)
        model.token(1.0, Telemetry(), Telemetry(), 1, 1)
        assertEquals(null, state.drafts)
    }

    @Test
    fun `the last tokens are kept, times follow slowly, the peak stays`() {
        for (number in 1..300L) {
            val ms = if (number == 1L) 1.0 else 2.0
            model.token(ms, Telemetry(), Telemetry(hits = number, denseMs = ms), memoryBytes = if (number == 5L) 900 else 100, expertBudgetBytes = 0)
        }
        assertEquals(120, state.samples.size)
        assertEquals(300, state.samples.last().hits)
        assertEquals(2.0, state.times.dense, 1e-9)
        assertEquals(900, state.peakBytes)
    }

    @Test
    fun `a new model begins anew, events are the newest first`() {
        model.token(1.0, Telemetry(), Telemetry(hits = 1), 1, 1)
        for (number in 1..9) model.event("event $number")
        assertEquals(listOf("event 9", "event 8", "event 7", "event 6", "event 5"), state.events)
        model.reset(expertBudgetBytes = 5, expertBytes = 9)
        assertEquals(TelemetryState(expertBudgetBytes = 5, expertBytes = 9), state)
    }
}
