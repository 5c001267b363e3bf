package dev.lesonnx.speculative

import dev.lesonnx.Bundle
import dev.lesonnx.IntList
import dev.lesonnx.LoadOptions
import dev.lesonnx.Model
import dev.lesonnx.Platform
import dev.lesonnx.REFERENCE_THREADS
import dev.lesonnx.Reference
import dev.lesonnx.Runner
import kotlin.random.Random

/** Verifies as much as is drafted, at most [length] tokens: no test depends on the clock. */
internal class Always(private val length: Int = MAX_DRAFT_TOKENS) : Pricing() {
    override val mayDraft = true

    override fun ask(most: Int, isFree: Boolean, newBytes: LongArray) = minOf(most, length)

    override fun choose(drafted: Int, confidence: IntArray?, isFree: Boolean, isDrawn: Boolean, newBytes: LongArray) = minOf(drafted, length)
}

/** Drafts what plain decoding gave behind a prompt of [promptTokens], each token wrong with the odds [wrong]. */
internal class Oracle(
    private val tokenIds: List<Int>,
    private val promptTokens: Int,
    private val wrong: Double = 0.0,
    private val vocabSize: Int = 2,
) : TokenDrafter {
    override val name = "oracle"
    override val maxTokens = MAX_DRAFT_TOKENS
    override val isFree = true
    private val random = Random(5)

    override fun propose(sequence: IntList, maxTokens: Int, sampler: DraftSampler): Draft {
        val begin = sequence.size - promptTokens
        val tokens = tokenIds.subList(minOf(begin, tokenIds.size), minOf(begin + maxTokens, tokenIds.size))
        return Draft(IntArray(tokens.size) { if (random.nextDouble() < wrong) random.nextInt(vocabSize) else tokens[it] })
    }

    override fun rewind(numTokens: Int) = Unit

    override fun close() = Unit
}

/** A model of a fixture that drafts, with the threads of the references. */
internal fun loadDrafting(
    name: String,
    pricing: Pricing = Always(),
    options: LoadOptions = LoadOptions(),
    platform: Platform = dev.lesonnx.platform,
    drafter: (Bundle, Runner) -> Drafter?,
): Model {
    val bundle = Bundle(Reference.bundle(name))
    return Model.load(bundle, platform, options.copy(numThreads = REFERENCE_THREADS)) { runner, _ ->
        drafter(bundle, runner)?.let { Speculator(runner, it, pricing) }
    }
}
