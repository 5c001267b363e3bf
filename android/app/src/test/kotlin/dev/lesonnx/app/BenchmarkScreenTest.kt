package dev.lesonnx.app

import dev.lesonnx.app.model.HostState
import dev.lesonnx.app.model.Rung
import org.junit.Assert.assertEquals
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertTrue
import org.junit.Test
import org.robolectric.Shadows.shadowOf
import java.io.File

/** The ladder on the real library. */
class BenchmarkScreenTest : ScreenTest() {
    @Test
    fun `every schedule is measured on the same tokens, and the model comes back`() {
        Fixtures.copySample(File(bundles, "sample"))
        start()
        click("Benchmark")
        waitFor("No bundle is loaded")
        click("Bundles")
        waitFor("Load")
        click("Load")
        waitUntil("the model") { models.host.state.value is HostState.Ready }
        click("Benchmark")
        waitFor("Measure")
        draw("benchmark-empty")
        click("Measure")
        waitUntil("the third row") { models.benchmark.state.value.results.size == 3 }
        assertNotNull(find("Stop"))
        waitUntil("all rows") { models.benchmark.state.value.isComplete && !models.benchmark.state.value.isRunning }
        waitUntil("the model again") { models.host.state.value is HostState.Ready }
        val results = models.benchmark.state.value.results
        assertEquals(Rung.entries, results.map { it.rung })
        assertEquals(0.0, results.first().hitRate, 0.0)
        assertTrue(results.last().hitRate > 0.2)
        assertTrue(results.last().readBytes < results.first().readBytes)
        assertTrue(texts().containsAll(Rung.entries.map { it.title }))
        assertEquals(listOf(Rung.DRAFTS), results.filter { it.drafts != null }.map { it.rung })
        assertTrue(texts().any { it.matches(Regex("Drafted tokens: \\d+ of \\d+ accepted, \\d+ %")) })
        draw("benchmark")
        click("Share")
        val sent = shadowOf(activity).nextStartedActivity
        assertNotNull(sent)
    }

    @Test
    fun `a benchmark can be stopped`() {
        Fixtures.copySample(File(bundles, "sample"))
        start()
        waitFor("Load")
        click("Load")
        waitUntil("the model") { models.host.state.value is HostState.Ready }
        click("Benchmark")
        click("Measure")
        waitUntil("a row") { models.benchmark.state.value.results.isNotEmpty() }
        click("Stop")
        waitUntil("the model again") { models.host.state.value is HostState.Ready }
        assertTrue(models.benchmark.state.value.results.size < Rung.entries.size)
    }
}
