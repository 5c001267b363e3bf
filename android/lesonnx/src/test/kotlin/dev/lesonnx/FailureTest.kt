package dev.lesonnx

import dev.lesonnx.jvm.JvmPlatform
import kotlinx.coroutines.runBlocking
import org.junit.jupiter.api.BeforeEach
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.assertThrows
import org.junit.jupiter.api.io.TempDir
import java.nio.file.Files
import java.nio.file.Path
import java.util.concurrent.atomic.AtomicInteger
import kotlin.io.path.ExperimentalPathApi
import kotlin.io.path.copyToRecursively
import kotlin.io.path.fileSize
import kotlin.io.path.readText
import kotlin.io.path.writeText
import kotlin.test.assertContains
import kotlin.test.assertEquals
import kotlin.test.assertTrue

/** What can be wrong with a bundle, a budget or a read ends in one line, and leaves nothing open. */
@OptIn(ExperimentalPathApi::class)
class FailureTest {
    @TempDir
    lateinit var directory: Path
    private lateinit var bundle: Path

    private val case = Reference.of("qwen3_moe-float").case("greedy-kernel")
    private val promptIds = case.promptIds.toIntArray()
    private val asReference = GenerationOptions(maxNewTokens = case.tokenIds.size, ignoreEos = true)
    private val least = Bundle(Reference.bundle("qwen3_moe-float")).leastBudgetBytes

    @BeforeEach
    fun copy() {
        bundle = directory.resolve("bundle")
        Reference.bundle("qwen3_moe-float").copyToRecursively(bundle, followLinks = false)
    }

    private fun load(options: LoadOptions = LoadOptions(), platform: Platform = dev.lesonnx.platform) =
        Model.load(bundle, platform, options.copy(numThreads = REFERENCE_THREADS))

    private fun pack() = Bundle(bundle).run { packFile(manifest.expertLayers[1].layerIdx) }

    private fun truncate(path: Path, numBytes: Long) = Files.newByteChannel(path, java.nio.file.StandardOpenOption.WRITE).use { it.truncate(numBytes) }

    @Test
    fun `a pack that is cut off is refused when the bundle opens`() {
        val pack = pack()
        val expected = pack.fileSize()
        truncate(pack, expected - 4096)
        assertEquals(
            "$pack: has ${grouped(expected - 4096)} bytes, expected ${grouped(expected)}; export again",
            assertThrows<BundleError> { load() }.message,
        )
    }

    @Test
    fun `a pack that is cut off later ends the run in one line`() {
        for (engine in listOf("kernel", "session")) {
            val pack = pack()
            val whole = Files.readAllBytes(pack)
            val counting = CountingPlatform()
            load(LoadOptions("on-demand", engine, expertBudgetBytes = least), counting).use { model ->
                truncate(pack, 0)
                val error = assertThrows<LoadError> { runBlocking { model.generate(promptIds, asReference).text() } }
                assertContains(checkNotNull(error.message), Regex("^layer \\d+ expert \\d+ cannot be loaded: .*ends at byte"))
                val again = assertThrows<LoadError> { runBlocking { model.generate(promptIds, asReference).text() } }
                assertEquals(error.message, again.message)
            }
            assertEquals(0, counting.liveBytes.get())
            Files.write(pack, whole)
        }
    }

    @Test
    fun `a read that fails is tried once more`() = runBlocking<Unit> {
        val failed = AtomicInteger()
        // Every fifth read, but never two in a row: a repeated one works.
        val flaky = FailingPlatform { number -> (number % 5 == 3).also { if (it) failed.incrementAndGet() } }
        load(LoadOptions("on-demand", "kernel", expertBudgetBytes = least), flaky).use { model ->
            val generation = model.generate(promptIds, asReference)
            generation.text()
            assertEquals(case.tokenIds, generation.report.tokenIds)
            assertTrue(failed.get() > 5)
        }
    }

    @Test
    fun `a read that fails twice ends the run, and closing still works`() {
        val counting = CountingPlatform(FailingPlatform { number -> number >= 12 })
        load(LoadOptions("les", "kernel", expertBudgetBytes = least), counting).use { model ->
            val error = assertThrows<LoadError> { runBlocking { model.generate(promptIds, asReference).text() } }
            assertContains(checkNotNull(error.message), Regex("^layer \\d+ expert \\d+ cannot be loaded: Input/output error$"))
        }
        assertEquals(0, counting.liveBytes.get())
        assertEquals(0, counting.openReaders.get())
    }

    @Test
    fun `budgets that are too small are named`() {
        assertEquals(
            "the expert budget is ${least - 1} bytes; this bundle needs at least $least",
            assertThrows<BudgetError> { load(LoadOptions(expertBudgetBytes = least - 1)) }.message,
        )
        val all = Bundle(bundle).expertBytes
        assertEquals(
            "the expert budget is $least bytes; schedule resident keeps all experts, $all",
            assertThrows<BudgetError> { load(LoadOptions("resident", expertBudgetBytes = least)) }.message,
        )
        load(LoadOptions(expertBudgetBytes = least)).use { model -> assertContains(model.notes.single(), "few can stay from one token to the next") }
    }

    @Test
    fun `options that do not exist are named`() {
        for ((options, expected) in listOf(
            LoadOptions(schedule = "eager") to "schedule 'eager' is not one of on-demand, cache, les, resident",
            LoadOptions(engine = "gpu") to "engine 'gpu' is not one of auto, kernel, session",
            LoadOptions(policy = "fifo") to "policy 'fifo' is not one of lru, lfu, les",
            LoadOptions(numLoaders = 0) to "num_loaders is 0, expected 1 to 64",
            LoadOptions(prefillChunkTokens = 0) to "prefill chunk is 0 tokens, expected at least 1",
            LoadOptions("on-demand", lookahead = true) to "schedule on-demand keeps nothing, so there is nothing to look ahead for",
        )) {
            assertEquals(expected, assertThrows<InputError> { load(options) }.message)
        }
    }

    @Test
    fun `without the kernel's library sessions compute, and a note says so`() = runBlocking<Unit> {
        val bare = JvmPlatform(kernelFile = null)
        load(platform = bare).use { model ->
            assertEquals("session", model.engineName)
            assertEquals(listOf("engine session is used, since the faster kernel cannot be: its library is not there"), model.notes)
            val generation = model.generate(promptIds, asReference)
            generation.text()
            assertEquals(case.tokenIds, generation.report.tokenIds)
        }
        assertEquals(
            "engine kernel cannot be used: its library is not there",
            assertThrows<InputError> { load(LoadOptions(engine = "kernel"), bare) }.message,
        )
        val broken = directory.resolve("liblesonnx.so").also { it.writeText("no library") }
        assertContains(
            checkNotNull(assertThrows<InputError> { load(LoadOptions(engine = "kernel"), JvmPlatform(broken)) }.message),
            "the kernel's library cannot be used: ",
        )
    }

    @Test
    fun `parts and manifests that are broken are named`() {
        val segment = bundle.resolve("dense/segment_000.onnx").takeIf(Files::exists) ?: bundle.resolve("dense/embed.onnx")
        val whole = Files.readAllBytes(segment)
        segment.writeText("no model")
        assertContains(checkNotNull(assertThrows<BundleError> { load() }.message), "$segment: ONNX Runtime does not take it: ")
        Files.write(segment, whole)

        val manifest = bundle.resolve("manifest.json")
        val text = manifest.readText()
        manifest.writeText(text.replace(Regex("\"onnxruntime_at_least\": \"[^\"]*\""), "\"onnxruntime_at_least\": \"9.5\""))
        val found = Ort.environment(REFERENCE_THREADS).version
        assertEquals("the bundle needs ONNX Runtime 9.5 or later, found $found", assertThrows<BundleError> { load() }.message)
        manifest.writeText(text.replaceFirst("\"kind\": \"attention_key\"", "\"kind\": \"recurrent\""))
        assertContains(checkNotNull(assertThrows<BundleError> { load() }.message), "is not fixed")
        manifest.writeText(text.take(text.length / 2))
        assertContains(checkNotNull(assertThrows<BundleError> { load() }.message), "$manifest: not JSON: ")
    }
}
