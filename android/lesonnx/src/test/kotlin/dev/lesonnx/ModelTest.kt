package dev.lesonnx

import kotlinx.coroutines.CompletableDeferred
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Deferred
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.async
import kotlinx.coroutines.cancelAndJoin
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.flow.first
import kotlinx.coroutines.flow.onEach
import kotlinx.coroutines.flow.take
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.isActive
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking
import kotlinx.coroutines.withTimeout
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonObject
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.assertThrows
import org.junit.jupiter.api.io.TempDir
import java.nio.file.Files
import java.nio.file.Path
import java.util.concurrent.CountDownLatch
import kotlin.concurrent.thread
import kotlin.io.path.copyToRecursively
import kotlin.io.path.ExperimentalPathApi
import kotlin.io.path.readText
import kotlin.io.path.writeText
import kotlin.test.assertEquals
import kotlin.test.assertFalse
import kotlin.test.assertIs
import kotlin.test.assertTrue

private const val SAMPLE = "sample-int4"

class ModelTest {
    private val reference = Reference.of(SAMPLE)
    private val greedy = reference.case("greedy-kernel")
    private val quarter = LoadOptions(expertBudgetBytes = reference.expertBudgetBytes.getValue("quarter"))
    private val asReference = GenerationOptions(maxNewTokens = greedy.tokenIds.size)
    private val prompt = checkNotNull(greedy.prompt)

    @Test
    fun `text and tokens are Python's`() = runBlocking<Unit> {
        loadFixture(SAMPLE, quarter).use { model ->
            for (case in reference.cases.filter { it.engine == "kernel" }) {
                val options = GenerationOptions(maxNewTokens = case.tokenIds.size, sampling = case.samplingOptions)
                val generation = model.generate(prompt, options)
                val tokens = generation.tokens.toList()
                assertEquals(case.tokenIds, tokens.mapNotNull { it.id })
                assertEquals(case.text, tokens.joinToString("") { it.text })
                assertEquals(case.tokenIds, generation.report.tokenIds)
                assertEquals(FinishReason.LENGTH, generation.report.finishReason)
                assertTrue(generation.report.tokensPerS > 0 && generation.report.prefillMs > 0)
            }
            val telemetry = model.telemetry
            assertTrue(telemetry.loads > 0 && telemetry.readBytes == telemetry.loads * model.bundle.experts[0].costBytes, "$telemetry")
        }
    }

    @Test
    fun `a generation can be collected again`() = runBlocking<Unit> {
        loadFixture(SAMPLE).use { model ->
            val generation = model.generate(prompt, asReference)
            assertEquals(generation.text(), generation.text())
            assertEquals(greedy.tokenIds, generation.report.tokenIds)
        }
    }

    @Test
    fun `a stop string ends the text before itself`() = runBlocking<Unit> {
        loadFixture(SAMPLE).use { model ->
            val generation = model.generate(prompt, asReference.copy(stop = listOf("LORD")))
            assertEquals(checkNotNull(greedy.text).substringBefore("LORD"), generation.text())
            assertEquals(FinishReason.STOP, generation.report.finishReason)
        }
    }

    @Test
    fun `a cancelled flow leaves the model usable`() = runBlocking<Unit> {
        loadFixture(SAMPLE, quarter).use { model ->
            assertEquals(greedy.tokenIds.take(3), model.generate(prompt, asReference).tokens.take(3).toList().map { it.id })

            val begun = CompletableDeferred<Unit>()
            val job = launch(Dispatchers.Default) {
                model.generate(prompt, GenerationOptions(maxNewTokens = 1000, ignoreEos = true)).tokens.onEach { begun.complete(Unit) }.collect()
            }
            begun.await()
            job.cancelAndJoin()

            val again = model.generate(prompt, asReference)
            again.text()
            assertEquals(greedy.tokenIds, again.report.tokenIds)
        }
    }

    @Test
    fun `a generation that begins ends the one before`() = runBlocking<Unit> {
        loadFixture(SAMPLE).use { model ->
            val error = assertThrows<IllegalStateException> {
                runBlocking {
                    model.generate(prompt, asReference).tokens.collect { token ->
                        if (token.id == greedy.tokenIds[3]) model.generate(prompt, asReference).tokens.first()
                    }
                }
            }
            assertEquals("another generation has begun with this model", error.message)
        }
    }

    @Test
    fun `of a generation that is collected twice at once the first ends`() = runBlocking<Unit> {
        loadFixture(SAMPLE).use { model ->
            val generation = model.generate(prompt, asReference)
            // In a scope of its own: the end of the first collection, which may come at any time now, must not be the second one's too.
            val others = CoroutineScope(Dispatchers.Default)
            lateinit var again: Deferred<List<Int?>>
            val error = assertThrows<IllegalStateException> {
                runBlocking {
                    generation.tokens.collect { token ->
                        if (token.id != greedy.tokenIds[3]) return@collect
                        val begun = CompletableDeferred<Unit>()
                        again = others.async { generation.tokens.onEach { begun.complete(Unit) }.toList().map { it.id } }
                        begun.await()
                    }
                }
            }
            assertEquals("another generation has begun with this model", error.message)
            assertEquals(greedy.tokenIds, again.await().filterNotNull())
            assertEquals(greedy.tokenIds, generation.report.tokenIds)
            assertEquals(FinishReason.LENGTH, generation.report.finishReason)
        }
    }

    @Test
    fun `what cannot be served is refused before any work`() {
        loadFixture(SAMPLE).use { model ->
            val context = model.bundle.manifest.model.maxPositionEmbeddings
            assertEquals(
                "a prompt of $context tokens leaves no room in the model's context of $context",
                assertThrows<ContextError> { model.generate(IntArray(context) { 5 }) }.message,
            )
            assertThrows<ContextError> { model.generate(intArrayOf(5), GenerationOptions(maxNewTokens = context)) }
            assertThrows<InputError> { model.generate(IntArray(0)) }
            assertEquals(
                "token id 2048 is outside 0..2047",
                assertThrows<InputError> { model.generate(intArrayOf(1, 2048)) }.message,
            )
            assertThrows<InputError> { model.generate(prompt, GenerationOptions(maxNewTokens = 0)) }
            assertThrows<InputError> { model.generate(prompt, GenerationOptions(stop = listOf(""))) }
            assertThrows<InputError> { model.generate("half a pair: \ud83d") }
            assertEquals(0, model.telemetry.loads)
        }
    }

    @Test
    fun `closing frees memory, files and threads`() = runBlocking<Unit> {
        for (engine in listOf("kernel", "session")) {
            val counting = CountingPlatform()
            val model = loadFixture(SAMPLE, quarter.copy(engine = engine), counting)
            // Grows the attention caches on the way.
            model.generate(IntArray(700) { 5 + it % 1000 }, GenerationOptions(maxNewTokens = 3)).text()
            assertTrue(counting.liveBytes.get() > 0)
            model.close()
            model.close()
            assertEquals(0, counting.liveBytes.get(), "bytes outside the heap")
            assertEquals(0, counting.openReaders.get(), "open packs")
            assertEquals(emptyList(), Thread.getAllStackTraces().keys.filter { it.name.startsWith("lesonnx") && it.isAlive })
            assertEquals(emptyList(), openFiles().filter { it.startsWith(model.bundle.directory.toRealPath().toString()) })
            assertThrows<IllegalStateException> { model.generate(prompt) }
        }
    }

    private fun openFiles(): List<String> = Files.newDirectoryStream(Path.of("/proc/self/fd")).use { links ->
        links.mapNotNull { link -> runCatching { Files.readSymbolicLink(link).toString() }.getOrNull() }
    }

    @Test
    fun `closing while a flow is collected ends the flow`() = runBlocking<Unit> {
        val counting = CountingPlatform()
        val model = loadFixture(SAMPLE, quarter, counting)
        val begun = CompletableDeferred<Unit>()
        val ended = CompletableDeferred<Throwable?>()
        launch(Dispatchers.Default) {
            ended.complete(
                runCatching {
                    model.generate(prompt, GenerationOptions(maxNewTokens = 2000, ignoreEos = true)).tokens.onEach { begun.complete(Unit) }.collect()
                }.exceptionOrNull(),
            )
        }
        begun.await()
        model.close()
        // Not a CancellationException, which would end the collector's coroutine without a word.
        assertEquals("the model is closed", assertIs<IllegalStateException>(ended.await()).message)
        assertEquals(0, counting.liveBytes.get())
        assertEquals("the model is closed", assertThrows<IllegalStateException> { model.generate(prompt) }.message)
        assertEquals("the model is closed", assertThrows<IllegalStateException> { model.encode(prompt) }.message)
    }

    @Test
    fun `closing waits for a text that is being encoded`() {
        val slow = SlowTokenizerPlatform()
        val model = loadFixture(SAMPLE, quarter, slow)
        val encoder = thread { model.encode(prompt) }
        slow.begun.await()
        val closer = thread { model.close() }
        while (closer.isAlive && closer.state != Thread.State.WAITING) Thread.sleep(1)
        assertFalse(slow.isClosed, "the tokenizer is freed while it encodes")
        slow.mayEnd.countDown()
        encoder.join()
        closer.join()
        assertTrue(slow.isClosed)
    }

    /** Its tokenizer encodes as long as the test wants. */
    private class SlowTokenizerPlatform : Platform by platform {
        val begun = CountDownLatch(1)
        val mayEnd = CountDownLatch(1)

        @Volatile
        var isClosed = false

        override fun openTokenizer(bundle: Bundle): Tokenizer {
            val inner = checkNotNull(platform.openTokenizer(bundle))
            return object : Tokenizer by inner {
                override fun encode(text: String, addSpecialTokens: Boolean): IntArray {
                    begun.countDown()
                    mayEnd.await()
                    return inner.encode(text, addSpecialTokens)
                }

                override fun close() {
                    isClosed = true
                    inner.close()
                }
            }
        }
    }

    @Test
    fun `pressure evicts between steps and changes no token`() = runBlocking<Unit> {
        for (engine in listOf("kernel", "session")) {
            val counting = CountingPlatform()
            loadFixture(SAMPLE, LoadOptions(engine = engine), counting).use { model ->
                val pressure = MemoryPressure(model)
                model.generate(prompt, asReference).text()
                model.generate(prompt, asReference.copy(maxNewTokens = 1)).text()
                val before = counting.liveBytes.get()
                val levels = listOf(5 to MemoryPressure.Level.MODERATE, 10 to MemoryPressure.Level.CRITICAL, 20 to MemoryPressure.Level.NORMAL)
                    .associate { (place, level) -> place to level }
                var count = 0
                val loads = model.telemetry.loads
                var least = before
                val tokens = model.generate(prompt, asReference).tokens.onEach {
                    least = minOf(least, counting.liveBytes.get())
                    levels[count++]?.let(pressure::report)
                }.toList()
                if (engine == "kernel") assertTrue(least < before, "pressure takes effect while a text is being generated")
                assertEquals(reference.case("greedy-$engine").tokenIds, tokens.mapNotNull { it.id })
                assertTrue(model.telemetry.loads > loads, "what was evicted is read again")

                pressure.report(MemoryPressure.Level.CRITICAL)
                model.generate(prompt, asReference.copy(maxNewTokens = 1)).text()
                if (engine == "kernel") {
                    val evicted = model.expertBudgetBytes - model.bundle.leastBudgetBytes
                    assertEquals(before - evicted, counting.liveBytes.get(), "the memory of evicted experts is given back")
                }
            }
        }
    }

    @Test
    fun `reports of pressure without end leave the steps their turn`() = runBlocking<Unit> {
        loadFixture(SAMPLE).use { model ->
            val pressure = MemoryPressure(model)
            val levels = MemoryPressure.Level.entries
            val noise = launch(Dispatchers.Default) {
                var count = 0
                while (isActive) pressure.report(levels[count++ % levels.size])
            }
            try {
                withTimeout(60_000) { assertEquals(greedy.text, model.generate(prompt, asReference).text()) }
            } finally {
                noise.cancelAndJoin()
            }
        }
    }

    @Test
    fun `a memory budget leaves the experts what is left`() {
        val error = assertThrows<BudgetError> { loadFixture(SAMPLE, LoadOptions(memoryBudgetBytes = 1 shl 20)) }
        assertTrue(error.message!!.startsWith("the memory budget is 1048576 bytes; runtime, dense parts"), error.message)
        val fixed = Regex("may take (\\d+)").find(error.message!!)!!.groupValues[1].toLong()
        // The process may have grown since: other tests run in it. So much room, and less than all experts.
        loadFixture(SAMPLE, LoadOptions(memoryBudgetBytes = fixed + (300L shl 20))).use { model ->
            runBlocking { assertEquals(greedy.text, model.generate(prompt, asReference).text()) }
        }
    }

    @OptIn(ExperimentalPathApi::class)
    @Test
    fun `a conversation goes on where it was`(@TempDir directory: Path) = runBlocking<Unit> {
        val copy = directory.resolve("bundle")
        Reference.bundle(SAMPLE).copyToRecursively(copy, followLinks = false)
        val manifest = copy.resolve("manifest.json")
        val frame = { role: String -> """"$role": {"prefix": "<|im_start|>$role\n", "suffix": "<|im_end|>\n"}""" }
        val format = """{"start": "", "messages": {${frame("user")}, ${frame("assistant")}}, "answer": "<|im_start|>assistant\n"}"""
        val text = manifest.readText()
        val document = Json.parseToJsonElement(text) as JsonObject
        val tokenizer = document.getValue("tokenizer") as JsonObject
        val changed = document + ("tokenizer" to JsonObject(tokenizer + ("chat_format" to Json.parseToJsonElement(format))))
        manifest.writeText(JsonObject(changed).toString())

        Model.load(copy, platform, LoadOptions(numThreads = REFERENCE_THREADS)).use { model ->
            assertTrue(model.hasChat)
            val options = GenerationOptions(maxNewTokens = 8)
            val question = ChatMessage(ChatRole.USER, "In the beginning")
            val first = model.chat(listOf(question), options)
            val answer = first.text()
            assertEquals(0, first.report.reusedTokens)
            val second = model.chat(listOf(question, ChatMessage(ChatRole.ASSISTANT, answer), ChatMessage(ChatRole.USER, "And then?")), options)
            second.text()
            assertTrue(second.report.reusedTokens >= first.report.promptTokens, "${second.report}")
            assertThrows<InputError> { model.chat(listOf(ChatMessage(ChatRole.SYSTEM, "Be brief."))) }
        }
        loadFixture("qwen3_moe-float").use { model ->
            assertFalse(model.hasChat)
            assertThrows<InputError> { model.chat(listOf(ChatMessage(ChatRole.USER, "?"))) }
        }
    }

    @Test
    fun `a bundle without tokenizer takes ids`() = runBlocking<Unit> {
        loadFixture("qwen3_moe-float").use { model ->
            val case = Reference.of("qwen3_moe-float").case("greedy-kernel")
            assertFalse(model.hasTokenizer)
            val generation = model.generate(case.promptIds.toIntArray(), GenerationOptions(maxNewTokens = case.tokenIds.size, ignoreEos = true))
            assertEquals("", generation.text())
            assertEquals(case.tokenIds, generation.report.tokenIds)
            assertThrows<InputError> { model.generate("text") }
            assertThrows<InputError> { model.generate(intArrayOf(1), GenerationOptions(stop = listOf("x"))) }
        }
    }
}
