package dev.lesonnx.speculative

import dev.lesonnx.BudgetError
import dev.lesonnx.Bundle
import dev.lesonnx.GenerationOptions
import dev.lesonnx.IntList
import dev.lesonnx.LoadOptions
import dev.lesonnx.REFERENCE_THREADS
import dev.lesonnx.Reference
import dev.lesonnx.Sampler
import dev.lesonnx.SamplingOptions
import dev.lesonnx.loadFixture
import dev.lesonnx.openRunner
import dev.lesonnx.platform
import kotlin.test.assertEquals
import kotlinx.coroutines.runBlocking
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows

/** The bundle's own drafter proposes what Python's does, and is as sure of it. */
internal class DSparkDrafterTest {
    @TestFactory
    fun `drafts, confidences and draws are Python's`(): List<DynamicTest> = listOf("sample-dspark-float", "sample-dspark-int4").map { name ->
        dynamicTest(name) {
            val bundle = Bundle(Reference.bundle(name))
            val reference = checkNotNull(Reference.of(name).drafter)
            openRunner(bundle, LoadOptions()).use { runner ->
                DSparkDrafter(bundle, platform, REFERENCE_THREADS).use { drafter ->
                    runner.layerReader = drafter
                    val greedy = Sampler(SamplingOptions())
                    val target = Sampler(reference.sampling.options)
                    val drawing = DraftSampler(target)
                    val prompt = reference.promptIds.toIntArray()
                    val sequence = IntList()
                    fun append(token: Int) {
                        sequence.add(token)
                        target.accept(token)
                    }
                    prompt.forEach(::append)
                    append(greedy.sample(runner.prefill(prompt)))
                    for ((pass, drawn) in reference.passes zip reference.sampled) {
                        assertEquals(drawn, drafter.propose(sequence, drafter.maxTokens, drawing).tokenIds.asList())
                        val draft = drafter.propose(sequence, reference.draftTokens, DraftSampler(greedy))
                        assertEquals(pass.drafted, draft.tokenIds.asList())
                        assertEquals(pass.confidence, draft.confidence?.asList())
                        val begin = runner.numTokens
                        val rows = runner.draftStep(intArrayOf(sequence[begin]) + draft.tokenIds)
                        val verified = verify(draft, rows, greedy)
                        assertEquals(pass.accepted, verified.accepted)
                        runner.keep(1 + verified.accepted)
                        assertEquals(begin + 1 + verified.accepted, runner.numTokens)
                        verified.tokenIds.forEach(::append)
                    }
                    assertEquals(reference.tokenIds, sequence.toIntArray().drop(prompt.size))
                }
            }
        }
    }

    @Test
    fun `a prompt of many chunks is seen as one of few`() {
        val bundle = Bundle(Reference.bundle("sample-dspark-float"))
        // More than are kept pending at once, chunk by chunk and in all.
        val prompt = IntArray(150) { 3 + it * 7 % 2000 }
        val drafts = listOf(7, 50, 150).map { chunk ->
            openRunner(bundle, LoadOptions(prefillChunkTokens = chunk)).use { runner ->
                DSparkDrafter(bundle, platform, REFERENCE_THREADS).use { drafter ->
                    runner.layerReader = drafter
                    runner.prefill(prompt)
                    val sequence = IntList().also { prompt.forEach(it::add) }.also { it.add(5) }
                    drafter.propose(sequence, drafter.maxTokens, DraftSampler(Sampler(SamplingOptions()))).tokenIds.asList()
                }
            }
        }
        assertEquals(drafts[0], drafts[1])
        assertEquals(drafts[0], drafts[2])
    }

    @Test
    fun `a budget of the whole process counts it`() {
        val name = "sample-dspark-float"
        val options = LoadOptions(draft = "dspark", memoryBudgetBytes = 8L shl 30)
        loadFixture(name, options).use { model ->
            val case = Reference.of(name).case("greedy-kernel")
            val generation = model.generate(case.promptIds.toIntArray(), GenerationOptions(20, ignoreEos = true))
            runBlocking { generation.text() }
            assertEquals(case.tokenIds.take(20), generation.report.tokenIds)
        }
        assertThrows<BudgetError> { loadFixture(name, options.copy(memoryBudgetBytes = 1L shl 20)) }
    }
}
