package dev.lesonnx

import org.junit.jupiter.api.Test
import org.junit.jupiter.api.assertThrows
import kotlin.test.assertEquals
import kotlin.test.assertTrue

class RunnerTest {
    private val reference = Reference.of("sample-int4")
    private val bundle = Bundle(Reference.bundle("sample-int4"))
    private val options = LoadOptions(expertBudgetBytes = reference.expertBudgetBytes.getValue("quarter"))

    private fun bits(logits: FloatArray) = IntArray(logits.size) { logits[it].toRawBits() }

    private fun ids(count: Int) = IntArray(count) { 3 + it * 7 % 2000 }

    @Test
    fun `attention caches that grow on the way change no bit`() {
        val ends = listOf(false, true).map { reservesFirst ->
            openRunner(bundle, options).use { runner ->
                if (reservesFirst) runner.states.reserve(1024)
                runner.prefill(ids(500))
                val rows = (0 until 30).map { bits(runner.step(intArrayOf(10 + it), intArrayOf(0))) }
                assertEquals(1024, runner.states.capacityTokens)
                rows
            }
        }
        for ((grown, whole) in ends[0] zip ends[1]) assertTrue(whole.contentEquals(grown))
    }

    @Test
    fun `after a rewind the same step gives the same logits`() = openRunner(bundle, options).use { runner ->
        runner.prefill(ids(20))
        val first = bits(runner.step(intArrayOf(7), intArrayOf(0)))
        runner.step(intArrayOf(8), intArrayOf(0))
        runner.rewind(20)
        assertEquals(20, runner.numTokens)
        assertSameBits(first, runner.step(intArrayOf(7), intArrayOf(0)), "the step again")
        assertEquals(20, runner.commonTokens(Prompt(ids(30))))
        assertEquals(19, runner.commonTokens(Prompt(ids(20))), "the last token must run")
        assertThrows<IllegalArgumentException> { runner.rewind(22) }
        Unit
    }

    @Test
    fun `several rows give each its logits`() = openRunner(bundle, options).use { runner ->
        val rows = bits(runner.step(ids(5), intArrayOf(4, 0)))
        runner.rewind(0)
        val other = runner.step(ids(5), intArrayOf(0, 4))
        assertSameBits(rows.copyOfRange(2048, 4096) + rows.copyOfRange(0, 2048), other, "rows in another order")
        runner.rewind(0)
        // One row and several round differently in quantized heads.
        val last = runner.step(ids(5), intArrayOf(4))
        for (token in last.indices) assertEquals(Float.fromBits(rows[token]), last[token], 1e-3f)
    }

    @Test
    fun `the context is the model's`() = openRunner(bundle, options).use { runner ->
        val context = bundle.manifest.model.maxPositionEmbeddings
        assertThrows<ContextError> { runner.prefill(ids(context + 1)) }
        assertEquals(0, runner.numTokens)
        runner.prefill(ids(context))
        val error = assertThrows<ContextError> { runner.step(intArrayOf(1), intArrayOf(0)) }
        assertEquals("${context + 1} tokens do not fit the model's context of $context", error.message)
    }

    @Test
    fun `a prefill in smaller chunks goes on where the last chunk ended`() {
        // Float bundles do not round by the number of rows so far that a token changes.
        val name = "qwen3_moe-float"
        val case = Reference.of(name).case("greedy-kernel")
        openRunner(Bundle(Reference.bundle(name)), LoadOptions(prefillChunkTokens = 3)).use { runner ->
            var chunks = 0
            val logits = runner.prefill(case.promptIds.toIntArray()) { chunks++ }
            assertEquals((case.promptIds.size + 2) / 3, chunks)
            assertEquals(case.tokenIds[0], Sampler(SamplingOptions()).sample(logits))
        }
    }
}
