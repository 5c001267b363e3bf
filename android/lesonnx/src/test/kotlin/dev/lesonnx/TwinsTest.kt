package dev.lesonnx

import ai.onnxruntime.providers.NNAPIFlags
import kotlinx.coroutines.runBlocking
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows
import org.junit.jupiter.api.io.TempDir
import java.nio.file.Path
import java.util.EnumSet
import kotlin.io.path.ExperimentalPathApi
import kotlin.io.path.copyToRecursively
import kotlin.io.path.writeText
import kotlin.test.assertContains
import kotlin.test.assertEquals
import kotlin.test.assertTrue

/** Twins of dense parts: run on the CPU provider as Python runs them; where they cannot be had, the plain parts compute, and a line says why. */
class TwinsTest {
    @TempDir
    lateinit var directory: Path

    private val names = listOf("qwen3_moe-twins-ios-float", "qwen2_moe-twins-android-int4")

    @TestFactory
    fun `logits by twins are Python's, beyond what their caches hold too`(): List<DynamicTest> = names.flatMap { name ->
        val reference = Reference.of(name)
        val bundle = Bundle(Reference.bundle(name))
        assertTrue(reference.twins.isNotEmpty())
        reference.twins.flatMap { case ->
            listOf("les" to "quarter", "on-demand" to "least").map { (schedule, budget) ->
                dynamicTest("$name ${case.name} $schedule $budget") {
                    val counting = CountingPlatform()
                    val options = LoadOptions(schedule, case.engine, expertBudgetBytes = reference.expertBudgetBytes.getValue(budget), accelerate = "cpu")
                    openRunner(bundle, options, counting).use { runner ->
                        assertEquals(checkNotNull(bundle.manifest.twins).capacityTokens, runner.states.capacityFor(1))
                        assertIsReference(runner, case)
                        assertTrue(runner.states.capacityTokens > checkNotNull(bundle.manifest.twins).capacityTokens)
                    }
                    assertEquals(0, counting.liveBytes.get())
                }
            }
        }
    }

    private fun generate(model: Model, case: Reference.Case): List<Int> {
        val generation = model.generate(case.promptIds.toIntArray(), GenerationOptions(case.tokenIds.size, ignoreEos = true))
        runBlocking { generation.text() }
        return generation.report.tokenIds
    }

    @Test
    fun `a provider that the installed ONNX Runtime lacks is passed over with a message once`() {
        val name = names[1]
        val case = Reference.of(name).case("greedy-kernel")
        val phone = object : Platform by platform {
            override val target = Target.ANDROID
        }
        loadFixture(name, platform = phone).use { model ->
            val listed = listOf("QNNExecutionProvider", "NnapiExecutionProvider", "XnnpackExecutionProvider")
            assertEquals(listed.map { "the installed ONNX Runtime has no $it: dense parts run without it" }, model.notes)
            assertEquals(case.tokenIds, generate(model, case))
        }
        // A desktop is in no list of this bundle.
        loadFixture(name).use { model -> assertEquals(emptyList(), model.notes) }
        loadFixture(name, LoadOptions(accelerate = "off"), phone).use { model -> assertEquals(emptyList(), model.notes) }
    }

    @OptIn(ExperimentalPathApi::class)
    @Test
    fun `where a twin does not open, steps of its width use the plain parts and a note says so`() {
        val bundle = directory.resolve("bundle")
        Reference.bundle(names[0]).copyToRecursively(bundle, followLinks = false)
        val twins = checkNotNull(Bundle(bundle).manifest.twins)
        for (path in twins.parts.map { it.path }) bundle.resolve(path).writeText("no model")
        val case = Reference.of(names[0]).case("greedy-kernel")
        Model.load(bundle, platform, LoadOptions(accelerate = "cpu", numThreads = REFERENCE_THREADS)).use { model ->
            assertEquals(twins.parts.map { it.rows }.distinct().size, model.notes.size)
            for (note in model.notes) assertContains(note, Regex("^steps of \\d+ tokens do not use CPUExecutionProvider: .*ONNX Runtime does not take it: "))
            assertEquals(case.tokenIds, generate(model, case))
        }
    }

    @Test
    fun `drafts are verified beside twins`() {
        val case = Reference.of(names[0]).twins.first()
        loadFixture(names[0], LoadOptions(accelerate = "cpu", draft = "ngram")).use { model -> assertEquals(case.tokenIds, generate(model, case)) }
    }

    @Test
    fun `what is not there or not known is named`() {
        val error = assertThrows<InputError> { loadFixture("sample-int4", LoadOptions(accelerate = "cpu")) }
        assertContains(checkNotNull(error.message), "has no twins; export with --accelerate dense")
        assertEquals(
            "accelerate is 'gpu', expected one of auto, off, cpu",
            assertThrows<InputError> { loadFixture("sample-int4", LoadOptions(accelerate = "gpu")) }.message,
        )
        Ort.sessionOptions(optimise = true, numThreads = 1).use { options ->
            assertEquals("provider XExecutionProvider is not known here", assertThrows<BundleError> { options.use(Provider("XExecutionProvider")) }.message)
        }
    }

    @Test
    fun `lists lose what is missing and options that need a directory`() {
        val listed = listOf(Provider("A", mapOf("cache" to "{cache}/a", "x" to "1")), Provider("B"))
        val installed = installedProviders(listed, setOf("A", "C"))
        assertEquals(listOf(Provider("A", mapOf("x" to "1"))), installed.found)
        assertEquals(listOf("the installed ONNX Runtime has no B"), installed.notes)
    }

    @Test
    fun `NNAPI's flags are a sum`() {
        assertEquals(EnumSet.of(NNAPIFlags.USE_FP16, NNAPIFlags.CPU_DISABLED), nnapiFlags(mapOf("flags" to "5")))
        assertEquals(EnumSet.noneOf(NNAPIFlags::class.java), nnapiFlags(emptyMap()))
        for (text in listOf("many", "-1", "16")) {
            assertContains(checkNotNull(assertThrows<BundleError> { nnapiFlags(mapOf("flags" to text)) }.message), "flags are '$text', expected a sum of 1 to 15")
        }
    }
}
