package dev.lesonnx.app.model

import dev.lesonnx.Bundle
import dev.lesonnx.GenerationOptions
import dev.lesonnx.InputError
import dev.lesonnx.LoadOptions
import dev.lesonnx.Model
import dev.lesonnx.app.Fixtures
import dev.lesonnx.store.BundleStore
import dev.lesonnx.store.Device
import dev.lesonnx.store.DirectorySource
import dev.lesonnx.store.Fit
import dev.lesonnx.vision.Picture
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.cancelChildren
import kotlinx.coroutines.flow.first
import kotlinx.coroutines.job
import kotlinx.coroutines.runBlocking
import kotlinx.coroutines.withTimeout
import org.junit.Rule
import org.junit.Test
import org.junit.rules.TemporaryFolder
import java.io.File
import kotlin.test.assertEquals
import kotlin.test.assertNotNull
import kotlin.test.assertNull
import kotlin.test.assertTrue

/** The screens' models on the real library, without a screen and without Android. */
class ModelsTest {
    @get:Rule
    val folder = TemporaryFolder()

    private val host = ModelHost(Dispatchers.Default) { bundle, options -> Model.load(bundle, Fixtures.platform, options) }
    private val telemetry = TelemetryModel()
    private var available = 8L shl 30

    private fun bundles(scope: CoroutineScope) = BundlesModel(
        BundleStore(folder.root.toPath().resolve("bundles")),
        host,
        { Device(available, available, processBytes = 100L shl 20, reserveBytes = 0, storageBytes = 1L shl 40) },
        scope,
        Dispatchers.IO,
    )

    private fun test(work: suspend CoroutineScope.() -> Unit) = runBlocking {
        withTimeout(60_000) {
            work()
            host.close()
            coroutineContext.job.cancelChildren()
        }
    }

    private fun putSample() = Fixtures.copySample(File(folder.root, "bundles/sample"))

    @Test
    fun `a bundle is imported, loaded as the memory choice says, and deleted while it is loaded`() = test {
        val model = bundles(this)
        model.refresh()
        assertTrue(model.state.first { it.bundles != null }.bundles!!.isEmpty())
        model.import("my sample.zip", DirectorySource(Fixtures.sample.toPath()))
        val item = model.state.first { it.bundles?.isNotEmpty() == true && it.arrival == null }.bundles!!.single()
        assertEquals("my-sample", item.stored.name)
        assertEquals(Fit.WHOLE, item.fit?.fit)
        model.chooseMemory(MemoryChoice.LEAST)
        model.open(item)
        val ready = host.state.first { it is HostState.Ready } as HostState.Ready
        assertEquals(item.fit!!.needs.leastBudget, ready.expertBytes)
        assertTrue(ready.notes.any { it.contains("few can stay") })
        model.delete(item)
        assertTrue(model.state.first { it.bundles?.isEmpty() == true }.paused.isEmpty())
        assertEquals(HostState.Empty, host.state.value)
    }

    @Test
    fun `what cannot be imported is said, and nothing is left`() = test {
        val model = bundles(this)
        val empty = folder.newFolder("empty")
        model.import("empty", DirectorySource(empty.toPath()))
        val state = model.state.first { it.problem != null && it.bundles != null }
        assertEquals("empty: not a bundle, it holds no checksums.json", state.problem)
        assertTrue(state.bundles!!.isEmpty())
    }

    @Test
    fun `a device that is too small is told so, and the bundle cannot be opened`() = test {
        putSample()
        available = 20L shl 20
        val model = bundles(this)
        model.refresh()
        val item = model.state.first { it.bundles != null }.bundles!!.single()
        assertEquals(Fit.TOO_LITTLE_MEMORY, item.fit?.fit)
        assertTrue(!model.canOpen(item))
        assertTrue(item.fit!!.summary.startsWith("Needs "), item.fit.summary)
    }

    @Test
    fun `a load that fails is a state with its line`() = test {
        val bundle = Bundle(putSample().toPath())
        host.load("sample", bundle, LoadOptions(expertBudgetBytes = 1))
        val failed = host.state.value as HostState.Failed
        assertTrue(failed.message.startsWith("the expert budget is 1 bytes"), failed.message)
        assertNull(host.use { it })
    }

    @Test
    fun `an answer grows to the library's text, and its figures are kept`() = test {
        val bundle = Bundle(putSample().toPath())
        host.load("sample", bundle, LoadOptions())
        val options = GenerationOptions(maxNewTokens = 20)
        val chat = ChatModel(host, telemetry, this, options)
        chat.send("In the beginning")
        val answer = chat.state.first { it.messages.size == 2 && !it.isGenerating }.messages.last()
        val expected = host.use { it.generate("In the beginning", options).text() }
        assertEquals(expected, answer.text)
        assertTrue(assertNotNull(answer.note).startsWith("20 tokens, "), answer.note)
        // The first token is the prefill's.
        assertEquals(19, telemetry.state.value.samples.size)
    }

    @Test
    fun `pictures are held until they are sent, and a question that was refused does not spoil the conversation`() = test {
        Fixtures.copyPictured(File(folder.root, "bundles/pictured"))
        host.load("pictured", Bundle(folder.root.toPath().resolve("bundles/pictured")), LoadOptions())
        assertNull((host.state.value as HostState.Ready).whyNoPictures)
        val chat = ChatModel(host, telemetry, this, GenerationOptions(maxNewTokens = 8, ignoreEos = true))
        suspend fun attach(picture: Picture) {
            chat.attach { picture }
            assertTrue(!chat.send("While it is opened"))
            chat.state.first { !it.isAttaching }
        }
        suspend fun ask(text: String): Message {
            assertTrue(chat.send(text))
            return chat.state.first { !it.isGenerating }.messages.last()
        }
        val square = Picture(60, 60, ByteArray(3 * 60 * 60) { 9 })
        val strip = Picture(1, 9000, ByteArray(27000))
        assertTrue(!chat.send(" "))
        chat.attach { throw InputError("it is gone") }
        assertEquals("it is gone", chat.state.first { !it.isAttaching }.problem)
        attach(strip)
        attach(square)
        assertEquals(listOf(strip, square), chat.state.value.pictures)
        assertNull(chat.state.value.problem)
        val refused = ask("What is it?")
        assertTrue(refused.isError && "too narrow" in refused.note.orEmpty(), refused.note)
        attach(square)
        chat.remove(square)
        assertTrue(chat.state.value.pictures.isEmpty())
        attach(square)
        // A picture alone is a question, and the refused one is not asked again.
        ask("").let { assertTrue("pictures read in" in it.note.orEmpty(), it.note) }
        ask("And now?").let { assertTrue(!it.isError, it.note) }
        // A bundle without eyes goes on with the texts.
        host.load("sample", Bundle(Fixtures.copySample(File(folder.root, "bundles/sample"), hasChat = true).toPath()), LoadOptions())
        assertEquals("this bundle has no eyes: it takes no pictures", (host.state.value as HostState.Ready).whyNoPictures)
        assertTrue(!ask("And without?").isError)
        attach(square)
        ask("What is it?").let { assertTrue("no eyes" in it.note.orEmpty(), "$it") }
    }

    @Test
    fun `loading another bundle ends the answer under way`() = test {
        val bundle = Bundle(putSample().toPath())
        host.load("sample", bundle, LoadOptions())
        val chat = ChatModel(host, telemetry, this, GenerationOptions(maxNewTokens = 2000, ignoreEos = true))
        chat.send("In the beginning")
        chat.state.first { it.messages.last().text.isNotEmpty() }
        host.load("sample", bundle, LoadOptions())
        val last = chat.state.first { !it.isGenerating }.messages.last()
        assertEquals("Stopped", last.note)
        assertTrue(host.state.value is HostState.Ready)
    }

    @Test
    fun `without a model the answer says so`() = test {
        val chat = ChatModel(host, telemetry, this)
        chat.send("Hello")
        val last = chat.state.first { it.messages.isNotEmpty() && !it.isGenerating }.messages.last()
        assertTrue(last.isError)
        assertEquals("No bundle is loaded.", last.text)
    }

    @Test
    fun `the ladder gives one row a technique and the same tokens, then loads the bundle again`() = test {
        val bundle = Bundle(putSample().toPath())
        host.load("sample", bundle, LoadOptions(engine = "session"))
        val benchmark = BenchmarkModel(host, this, Span(warmupTokens = 4, leastTokens = 8, mostTokens = 8))
        benchmark.run()
        val state = benchmark.state.first { it.isComplete && !it.isRunning }
        assertNull(state.problem)
        assertEquals(Rung.entries, state.results.map { it.rung })
        assertTrue(state.results.all { it.tokensPerSecond > 0 })
        // Serial on demand reads every expert of every token: 6 layers, 4 experts.
        val token = 24 * (bundle.expertBytes / 192)
        // The model is a step ahead of its reader at most.
        assertTrue(state.results.first().readBytes in token * 7 / 8..token * 9 / 8, "${state.results.first().readBytes} of $token")
        assertEquals(11, state.asText().trim().lines().size + 1)
        val ready = host.state.first { it is HostState.Ready } as HostState.Ready
        assertEquals("session", ready.engine)
    }
}
