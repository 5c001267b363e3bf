package dev.lesonnx.speculative

import dev.lesonnx.BudgetError
import dev.lesonnx.Bundle
import dev.lesonnx.CountingPlatform
import dev.lesonnx.FailingPlatform
import dev.lesonnx.FinishReason
import dev.lesonnx.GenerationOptions
import dev.lesonnx.GenerationReport
import dev.lesonnx.LoadError
import dev.lesonnx.LoadOptions
import dev.lesonnx.Model
import dev.lesonnx.REFERENCE_THREADS
import dev.lesonnx.Prompt
import dev.lesonnx.Reference
import dev.lesonnx.Runner
import dev.lesonnx.SamplingOptions
import dev.lesonnx.loadFixture
import dev.lesonnx.platform
import java.util.concurrent.atomic.AtomicBoolean
import kotlin.test.assertContains
import kotlin.test.assertEquals
import kotlin.test.assertTrue
import kotlinx.coroutines.CompletableDeferred
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.cancelAndJoin
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.flow.onEach
import kotlinx.coroutines.flow.take
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import org.junit.jupiter.api.assertThrows

private const val SAMPLE = "sample-dspark-float"
private const val PROMPT = "CREATE TABLE t (a integer, b integer);\nCREATE TABLE u (a integer, b integer);\nCREATE"

/** Drafting as a whole: the tokens, ends and states of plain decoding, whoever drafts and whatever is right. */
internal class SpeculatorTest {
    private fun options(count: Int, sampling: SamplingOptions = SamplingOptions(), stop: List<String> = emptyList()) =
        GenerationOptions(count, sampling, stop, ignoreEos = true)

    private fun report(model: Model, prompt: IntArray, options: GenerationOptions): Pair<String, GenerationReport> = runBlocking {
        val generation = model.generate(prompt, options)
        generation.text() to generation.report
    }

    private fun plain(options: GenerationOptions = options(48)): Pair<String, GenerationReport> =
        loadFixture(SAMPLE).use { report(it, it.encode(PROMPT), options) }

    private fun drafterOf(name: String, expected: GenerationReport): (Bundle, Runner) -> Drafter = { bundle, _ ->
        when (name) {
            "oracle" -> Oracle(expected.tokenIds, expected.promptTokens, wrong = 0.3, vocabSize = 2048)
            "draft-model" -> DraftModelDrafter(bundle, bundle, platform, "auto", REFERENCE_THREADS)
            "dspark" -> DSparkDrafter(bundle, platform, REFERENCE_THREADS)
            else -> NgramDrafter()
        }
    }

    @TestFactory
    fun `the sample gives the tokens without drafts`(): List<DynamicTest> {
        val (text, expected) = plain()
        return listOf("ngram", "draft-model", "dspark", "oracle").flatMap { name ->
            listOf(1, 4, 15).map { length ->
                dynamicTest("$name $length") {
                    val counting = CountingPlatform()
                    loadDrafting(SAMPLE, Always(length), platform = counting, drafter = drafterOf(name, expected)).use { model ->
                        val (found, report) = report(model, model.encode(PROMPT), options(48))
                        assertEquals(expected.tokenIds, report.tokenIds)
                        assertEquals(text, found)
                        val drafts = checkNotNull(report.drafts)
                        assertTrue(drafts.accepted.sum() > 5 && drafts.passes > 0, "$drafts")
                    }
                    assertEquals(0, counting.liveBytes.get())
                    assertEquals(0, counting.openReaders.get())
                }
            }
        }
    }

    /** States of every kind go back to the last right token, and the next step goes on from there. */
    @TestFactory
    fun `fixtures give the tokens without drafts`(): List<DynamicTest> =
        listOf("qwen3_moe-float", "lfm2_moe-float", "qwen3_next-float", "deepseek_v3-float").filter { it in Reference.BUNDLES }.flatMap { name ->
            val case = Reference.of(name).case("greedy-kernel")
            listOf(0.0, 0.5, 1.0).map { wrong ->
                dynamicTest("$name, $wrong wrong") {
                    val vocabSize = Bundle(Reference.bundle(name)).manifest.model.vocabSize
                    loadDrafting(name, Always(6)) { _, _ -> Oracle(case.tokenIds, case.promptIds.size, wrong, vocabSize) }.use { model ->
                        val (_, report) = report(model, case.promptIds.toIntArray(), options(case.tokenIds.size))
                        assertEquals(case.tokenIds, report.tokenIds)
                    }
                }
            }
        }

    @Test
    fun `sampled tokens with chosen drafts are those without`() {
        for (seed in 1uL..3uL) {
            val chosen = options(48, SamplingOptions(temperature = 0.8, topP = 0.95, repetitionPenalty = 1.1, seed = seed))
            val (_, expected) = plain(chosen)
            for (name in listOf("ngram", "oracle")) {
                loadDrafting(SAMPLE, drafter = drafterOf(name, expected)).use { model ->
                    assertEquals(expected.tokenIds, report(model, model.encode(PROMPT), chosen).second.tokenIds, name)
                }
            }
        }
    }

    @Test
    fun `a draft model that is the target is nearly always right when drawn`() {
        loadDrafting(SAMPLE, Always(6), drafter = drafterOf("draft-model", GenerationReport(0))).use { model ->
            val chosen = options(60, SamplingOptions(temperature = 1.2, seed = 4u))
            val drafts = checkNotNull(report(model, model.encode(PROMPT), chosen).second.drafts)
            // p and q differ by rounding alone: min(1, p/q) is nearly 1, whatever the draws.
            assertTrue(drafts.judged.sum() > 30 && drafts.accepted.sum() >= 0.99 * drafts.judged.sum(), "$drafts")
        }
    }

    @Test
    fun `limits, stops and ends inside an accepted run are where they are without drafts`() {
        val (text, everything) = plain(options(40))
        val cases = listOf(1, 2, 3, 7, 20).map { options(it) } + options(40, stop = listOf(text.substring(text.length / 3).trim().take(3)))
        val plain = loadFixture(SAMPLE).use { model -> cases.map { report(model, model.encode(PROMPT), it) } }
        loadDrafting(SAMPLE) { _, _ -> Oracle(everything.tokenIds, everything.promptTokens) }.use { model ->
            for ((chosen, expected) in cases zip plain) {
                val (found, report) = report(model, model.encode(PROMPT), chosen)
                assertEquals(expected.first, found)
                assertEquals(expected.second.tokenIds, report.tokenIds)
                assertEquals(expected.second.finishReason, report.finishReason)
            }
        }
        assertEquals(FinishReason.STOP, plain.last().second.finishReason)
    }

    @Test
    fun `what follows a generation that ended inside an accepted run begins where plain decoding does`() = runBlocking<Unit> {
        val (_, everything) = plain(options(40))
        // One is cut short by its collector, one by its limit; then a prompt that goes on as the drafts did.
        val found = listOf(false, true).map { drafts ->
            loadDrafting(SAMPLE) { _, _ -> if (drafts) Oracle(everything.tokenIds, everything.promptTokens) else null }.use { model ->
                val prompt = model.encode(PROMPT)
                val longer = prompt + everything.tokenIds.take(30).toIntArray()
                suspend fun after(first: suspend () -> Unit): GenerationReport {
                    first()
                    return model.generation(Prompt(longer), options(5), reuse = true).also { it.text() }.report
                }
                listOf(3, 9).flatMap { taken ->
                    val cut = after { model.generate(prompt, options(40)).tokens.take(taken).toList() }
                    // The model may have been a token ahead of its collector.
                    assertTrue(cut.reusedTokens - prompt.size in taken - 1..taken, "${cut.reusedTokens} after $taken tokens")
                    val ended = after { model.generate(prompt, options(taken)).text() }
                    assertEquals(prompt.size + taken - 1, ended.reusedTokens)
                    listOf(cut.tokenIds, ended.tokenIds)
                }
            }
        }
        assertEquals(found[0], found[1])
    }

    @Test
    fun `a read that fails in a verify pass ends the generation in one line`() {
        val (_, everything) = plain(options(40))
        val fails = AtomicBoolean()
        val counting = CountingPlatform(FailingPlatform { fails.get() })
        val budget = Bundle(Reference.bundle(SAMPLE)).tokenDemandBytes
        loadDrafting(SAMPLE, options = LoadOptions(expertBudgetBytes = budget), platform = counting) { _, _ ->
            Oracle(everything.tokenIds, everything.promptTokens)
        }.use { model ->
            val prompt = model.encode(PROMPT)
            val error = assertThrows<LoadError> {
                runBlocking { model.generate(prompt, options(40)).tokens.collect { fails.set(true) } }
            }
            assertContains(checkNotNull(error.message), Regex("^layer \\d+ expert \\d+ cannot be loaded: Input/output error$"))
            fails.set(false)
            assertThrows<LoadError> { runBlocking { model.generate(prompt, options(2)).text() } }
        }
        assertEquals(0, counting.liveBytes.get())
    }

    @Test
    fun `a generation that is cancelled amid its passes leaves the model usable`() = runBlocking<Unit> {
        val (_, everything) = plain(options(200))
        loadDrafting(SAMPLE) { _, _ -> Oracle(everything.tokenIds, everything.promptTokens) }.use { model ->
            val prompt = model.encode(PROMPT)
            repeat(3) {
                val begun = CompletableDeferred<Unit>()
                val job = launch(Dispatchers.Default) { model.generate(prompt, options(200)).tokens.onEach { begun.complete(Unit) }.collect() }
                begun.await()
                job.cancelAndJoin()
            }
            val again = model.generate(prompt, options(200)).also { it.text() }
            assertEquals(everything.tokenIds, again.report.tokenIds)
        }
    }

    @Test
    fun `a budget of the whole process counts a draft model`() {
        val bundle = Reference.bundle(SAMPLE)
        val options = LoadOptions(draft = "draft-model", draftModel = bundle, memoryBudgetBytes = 8L shl 30)
        loadFixture(SAMPLE, options).use { model -> assertEquals(20, report(model, model.encode(PROMPT), options(20)).second.tokenIds.size) }
        val opened = Bundle(bundle)
        DraftModelDrafter(opened, opened, platform, "auto", REFERENCE_THREADS).use { drafter ->
            assertTrue(drafter.bytesAt(1) >= opened.expertBytes)
        }
        assertThrows<BudgetError> { loadFixture(SAMPLE, options.copy(memoryBudgetBytes = 1L shl 20)) }
    }

    @Test
    fun `by its own prices it drafts where that is quick and gives the same tokens`() {
        val (_, everything) = plain(options(200))
        loadDrafting(SAMPLE, Pricing()) { _, _ -> Oracle(everything.tokenIds, everything.promptTokens) }.use { model ->
            val (_, report) = report(model, model.encode(PROMPT), options(200))
            assertEquals(everything.tokenIds, report.tokenIds)
            val drafts = checkNotNull(report.drafts)
            assertTrue(drafts.accepted.sum() <= drafts.judged.sum() && drafts.judged.sum() <= drafts.drafted.sum(), "$drafts")
        }
    }
}
