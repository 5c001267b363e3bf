package dev.lesonnx

import kotlinx.coroutines.runBlocking
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows
import java.util.IdentityHashMap
import kotlin.random.Random
import kotlin.test.assertContains
import kotlin.test.assertEquals
import kotlin.test.assertTrue

/** States of fixed shape: how far a sequence goes back, what is exact about it, what it takes. */
class StatesTest {
    private fun recurrent(test: (Bundle) -> Unit): List<DynamicTest> =
        Reference.RECURRENT.map { name -> dynamicTest(name) { test(Bundle(Reference.bundle(name))) } }

    private fun open(bundle: Bundle, chunk: Int? = null) = openRunner(bundle, LoadOptions(prefillChunkTokens = chunk))

    private fun ids(count: Int, from: Int = 0) = IntArray(count) { 3 + (from + it) * 7 % 300 }

    private fun bits(logits: FloatArray) = IntArray(logits.size) { logits[it].toRawBits() }.toList()

    /** A step of tokens, of which so many stay. */
    private class Draft(val tokenIds: IntArray, val kept: Int)

    private fun script(random: Random): List<Draft> = listOf(Draft(tokens(random, 24), 24)) + List(12) {
        val count = random.nextInt(1, REWINDABLE_TOKENS + 1)
        Draft(tokens(random, count), random.nextInt(count + 1))
    }

    private fun tokens(random: Random, count: Int) = IntArray(count) { random.nextInt(300) }

    /** The logits of the rows that stay. */
    private fun run(runner: Runner, script: List<Draft>): List<Int> = script.flatMap { draft ->
        val before = runner.numTokens
        val logits = runner.step(draft.tokenIds, draft.tokenIds.indices.toList().toIntArray())
        runner.rewind(before + draft.kept)
        bits(logits.copyOf(draft.kept * runner.bundle.manifest.model.vocabSize))
    }

    @TestFactory
    fun `what was taken back leaves no trace`() = recurrent { bundle ->
        for (seed in 0 until 3) {
            val script = script(Random(seed))
            val others = Random(100 + seed)
            val other = script.map { Draft(it.tokenIds.copyOf(it.kept) + tokens(others, it.tokenIds.size - it.kept), it.kept) }
            val (got, expected) = listOf(script, other).map { steps -> open(bundle).use { run(it, steps) } }
            assertEquals(expected, got)
        }
    }

    @TestFactory
    fun `rewinding again inside the same step`() = recurrent { bundle ->
        val (got, expected) = listOf(listOf(31, 26, 26, 22), listOf(22)).map { path ->
            open(bundle).use { runner ->
                runner.step(ids(20), intArrayOf(0))
                runner.step(ids(14, from = 20), intArrayOf(0))
                for (numTokens in path) {
                    runner.rewind(numTokens)
                    assertEquals(numTokens, runner.numTokens)
                }
                bits(runner.step(ids(8, from = 50), intArrayOf(7)))
            }
        }
        assertEquals(expected, got)
    }

    @TestFactory
    fun `zero is always reached`() = recurrent { bundle ->
        open(bundle, chunk = 24).use { runner ->
            val first = bits(runner.prefill(ids(60)))
            repeat(2) {
                runner.rewind(0)
                assertEquals(first, bits(runner.prefill(ids(60))))
            }
        }
    }

    @TestFactory
    fun `out of reach is said and nothing is lost`() = recurrent { bundle ->
        for ((widths, numTokens, message) in listOf(
            Triple(listOf(40, 8), 39, "cannot rewind to 39 tokens: the states of this model go back to 40 to 48 tokens, or to 0"),
            Triple(listOf(40, 30), 69, "cannot rewind to 69 tokens: the states of this model go back to 40 or 70 tokens, or to 0"),
            Triple(listOf(20, 1), 1, "cannot rewind to 1 tokens: the states of this model go back to 20 to 21 tokens, or to 0"),
            Triple(listOf(17), 16, "cannot rewind to 16 tokens: the states of this model go back to 0 or 17 tokens, or to 0"),
        )) {
            val (got, expected) = listOf(true, false).map { rewinds ->
                open(bundle).use { runner ->
                    for (width in widths) runner.step(ids(width, from = runner.numTokens), intArrayOf(0))
                    if (rewinds) assertEquals(message, assertThrows<InputError> { runner.rewind(numTokens) }.message)
                    assertEquals(widths.sum(), runner.numTokens)
                    bits(runner.step(ids(5, from = 80), intArrayOf(4)))
                }
            }
            assertEquals(expected, got)
        }
    }

    @TestFactory
    fun `a step that breaks off has changed nothing`() = recurrent { bundle ->
        val (got, expected) = listOf(true, false).map { breaksOff ->
            open(bundle).use { runner ->
                runner.step(ids(10), intArrayOf(0))
                if (breaksOff) {
                    assertThrows<LesonnxError> { runner.states.breakOff(bundle.manifest) }
                    // What the broken step wrote over is no longer reached; where it began is.
                    val error = assertThrows<InputError> { runner.rewind(5) }
                    assertContains(error.message.orEmpty(), "go back to 10 to 10 tokens")
                }
                bits(runner.step(ids(8, from = 10), intArrayOf(7)))
            }
        }
        assertEquals(expected, got)
    }

    /** What a step of 8 tokens does that fails after its parts have written all states. */
    private fun LayerStates.breakOff(manifest: BundleManifest) {
        begin(8)
        for (state in manifest.states.filterNot { it.isAttention }) {
            val written = outputs(state.part, 8).getValue(state.output).floats
            for (index in 0 until written.capacity()) written.put(index, Float.NaN)
        }
        throw LesonnxError("the disk is gone")
    }

    @Test
    fun `a prompt reuses what can be reached`() = open(Bundle(Reference.bundle("qwen3_next-portable-float")), chunk = 24).use { runner ->
        val prompt = ids(70)
        val other = intArrayOf(prompt[0] + 1)
        runner.prefill(prompt.copyOf(48))
        runner.step(prompt.copyOfRange(48, 56), intArrayOf(0))
        assertEquals(56, runner.commonTokens(Prompt(prompt.copyOf(56) + other)))
        assertEquals(55, runner.commonTokens(Prompt(prompt.copyOf(56))))
        assertEquals(50, runner.commonTokens(Prompt(prompt.copyOf(50) + intArrayOf(299, 299))))
        assertEquals(0, runner.commonTokens(Prompt(prompt.copyOf(48))), "the first 47 are common, but the last step began at 48")
        assertEquals(0, runner.commonTokens(Prompt(other + other)))
        runner.rewind(0)
        runner.prefill(prompt.copyOf(48))
        // A step wider than what is kept: its beginning, or all of it.
        assertEquals(24, runner.commonTokens(Prompt(prompt.copyOf(40) + intArrayOf(299, 299))))
        assertEquals(48, runner.commonTokens(Prompt(prompt.copyOf(49))))
    }

    @TestFactory
    fun `a second prompt gives what a fresh model gives`() = recurrent { bundle ->
        open(bundle, chunk = 24).use { runner ->
            runner.prefill(ids(48))
            runner.step(ids(10, from = 48), intArrayOf(9))
            val second = ids(54) + ids(20, from = 100)
            val common = runner.commonTokens(Prompt(second))
            assertEquals(54, common)
            runner.rewind(common)
            val logits = runner.prefill(second.copyOfRange(common, second.size))
            // Other widths of steps round differently, float bundles so little that no token changes.
            val token = Sampler(SamplingOptions()).sample(logits)
            open(bundle, chunk = 24).use { fresh -> assertEquals(Sampler(SamplingOptions()).sample(fresh.prefill(second)), token) }
        }
    }

    @TestFactory
    fun `one generation after another begins with nothing`(): List<DynamicTest> = Reference.RECURRENT.map { name ->
        dynamicTest(name) {
            val case = Reference.of(name).case("greedy-kernel")
            loadFixture(name).use { model ->
                repeat(2) {
                    val generation = model.generate(case.promptIds.toIntArray(), GenerationOptions(maxNewTokens = case.tokenIds.size, ignoreEos = true))
                    runBlocking { generation.text() }
                    assertEquals(case.tokenIds, generation.report.tokenIds)
                }
            }
        }
    }

    @TestFactory
    fun `bytes are counted`() = recurrent { bundle ->
        val manifest = bundle.manifest
        Ort.environment(REFERENCE_THREADS)
        LayerStates(manifest, platform).use { states ->
            states.reserve(1)
            val tensors = IdentityHashMap<Tensor, Int>()
            for (side in 0..1) {
                assertEquals(side, states.side)
                for (part in manifest.parts) {
                    for (tensor in (states.inputs(part.name) + states.outputs(part.name, REWINDABLE_TOKENS)).values) tensors[tensor] = tensor.bytes.capacity()
                }
                states.begin(1)
                states.commit(1)
            }
            assertEquals(states.bytesAt(states.capacityTokens), tensors.values.sumOf { it.toLong() })
        }
    }

    @TestFactory
    fun `a memory budget counts the states, and what it tries out leaves nothing in them`() = recurrent { bundle ->
        val expected = open(bundle).use { bits(it.prefill(ids(30))) }
        open(bundle).use { runner ->
            val error = assertThrows<BudgetError> { runner.boundMemory(1) }
            val tokens = runner.states.capacityTokens
            assertContains(error.message.orEmpty(), "attention caches of $tokens tokens ${runner.states.bytesAt(tokens)}, and the experts")
            runner.boundMemory(1L shl 34)
            assertEquals(expected, bits(runner.prefill(ids(30))))
        }
    }

    @TestFactory
    fun `closing frees all memory`() = recurrent { bundle ->
        val counting = CountingPlatform()
        openRunner(bundle, LoadOptions(), counting).use { runner ->
            runner.prefill(ids(20))
            for (width in intArrayOf(5, 2)) runner.step(ids(width), intArrayOf(0))
            runner.rewind(26)
            assertTrue(counting.liveBytes.get() > runner.states.bytesAt(runner.states.capacityTokens))
        }
        assertEquals(0, counting.liveBytes.get())
    }

    @Test
    fun `rows are kept of narrow steps alone`() {
        val manifest = Bundle(Reference.bundle("qwen3_next-portable-float")).manifest
        Ort.environment(REFERENCE_THREADS)
        LayerStates(manifest, platform).use { states ->
            states.reserve(1)
            val names = manifest.states.flatMap { it.rowNames }.toSet()
            assertTrue(names.isNotEmpty())
            fun given(numRows: Int) = manifest.parts.flatMap { states.outputs(it.name, numRows).keys }.toSet() intersect names
            assertEquals(emptySet(), given(1) + given(REWINDABLE_TOKENS + 1))
            assertEquals(names, given(2))
            assertEquals(names, given(REWINDABLE_TOKENS))
        }
    }

    @Test
    fun `attention alone needs no second buffer`() = open(Bundle(Reference.bundle("qwen3_moe-float"))).use { runner ->
        runner.prefill(intArrayOf(1, 2, 3))
        runner.rewind(1)
        runner.step(intArrayOf(4), intArrayOf(0))
        assertEquals(0, runner.states.side)
        assertEquals(0, runner.states.workingBytes(512))
    }
}
