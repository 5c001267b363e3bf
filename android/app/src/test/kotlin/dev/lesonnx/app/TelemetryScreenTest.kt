package dev.lesonnx.app

import android.content.ComponentCallbacks2
import dev.lesonnx.app.model.HostState
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertTrue
import org.junit.Test
import java.io.File

/** Figures of real tokens. */
class TelemetryScreenTest : ScreenTest() {
    @Test
    fun `nothing measured is said`() {
        start()
        click("Telemetry")
        waitFor("Nothing measured yet")
    }

    @Test
    fun `a bundle with a drafter of its own drafts, and how well is told`() {
        Fixtures.copyDrafting(File(bundles, "drafting"))
        start()
        waitFor("Load")
        click("Load")
        waitUntil("the model") { models.host.state.value is HostState.Ready }
        click("Chat")
        type("The LORD said unto Moses")
        click("Send")
        waitUntil("an answer") { !models.chat.state.value.isGenerating }
        click("Telemetry")
        waitFor("Drafted tokens, last text")
        assertNotNull(models.telemetry.state.value.drafts)
        assertTrue(texts().any { it.matches(Regex("\\d+ of \\d+ accepted, \\d+ %")) })
    }

    @Test
    fun `tokens leave their figures, and memory pressure is told`() {
        Fixtures.copySample(File(bundles, "sample"))
        start(dark = false)
        waitFor("A quarter")
        click("A quarter")
        click("Load")
        waitUntil("the model") { models.host.state.value is HostState.Ready }
        click("Chat")
        type("The LORD said unto Moses")
        click("Send")
        waitUntil("an answer") { !models.chat.state.value.isGenerating }
        click("Telemetry")
        waitFor("Where a token's time goes")
        val state = models.telemetry.state.value
        assertTrue("${state.samples.size} samples", state.samples.size > 60)
        // 4 experts of 6 layers a token; the model may be a step ahead of its reader at both ends.
        val required = state.samples.sumOf { it.hits + it.late + it.misses }
        assertTrue("$required required", required in 24L * (state.samples.size - 1)..24L * (state.samples.size + 1))
        assertTrue("hits ${state.hitRate}", state.hitRate > 0.2 && state.hitRate < 1.0)
        assertTrue(state.readPerToken > 0 && state.tokensPerSecond > 0)
        draw("telemetry")

        app.onTrimMemory(ComponentCallbacks2.TRIM_MEMORY_BACKGROUND)
        waitUntil("the event") { texts().any { it.startsWith("Android asked for memory") } }
    }
}
