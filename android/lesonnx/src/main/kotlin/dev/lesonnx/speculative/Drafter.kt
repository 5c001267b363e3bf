package dev.lesonnx.speculative

import dev.lesonnx.IntList
import dev.lesonnx.LayerReader
import dev.lesonnx.PCG_STREAM
import dev.lesonnx.REWINDABLE_TOKENS
import dev.lesonnx.Sampler.Distribution
import dev.lesonnx.Tensor

/** The token before the drafts runs in the same pass, of which every row can be gone back to. */
internal const val MAX_DRAFT_TOKENS = REWINDABLE_TOKENS - 1

/** Drafters draw from a stream of their own: the target's draws do not depend on who drafts. */
internal const val DRAFT_STREAM = PCG_STREAM + 1

/**
 * Tokens that may come next, in order; perhaps none. Immutable.
 *
 * @property probabilities for each token what it was drawn from; null where tokens were not drawn but chosen
 * @property confidence for each token how likely it is right if all before it are, of `ONE`: it may depend on the tokens before
 *   it, not on the token itself, and is calibrated by whoever uses it; null where the drafter has no opinion
 */
internal class Draft(
    val tokenIds: IntArray,
    val probabilities: List<Distribution>? = null,
    val confidence: IntArray? = null,
) {
    companion object {
        val NONE = Draft(IntArray(0))
    }
}

/**
 * What a drafter is: it proposes tokens that may come next for one sequence; the target runs them all in one pass and keeps the
 * right ones. It knows tokens, not how they are verified, and nothing of what a draft costs the target.
 *
 * Not thread-safe; owned by a speculator, which closes it. As a [LayerReader] it is told what the layers of [layerIdxs] give, of
 * every step (a prompt's chunks, drafts that may be rejected); never where that is empty.
 */
internal interface Drafter : LayerReader, AutoCloseable {
    /** What `--draft` calls it. */
    val name: String

    /** The most it proposes at once, at most [MAX_DRAFT_TOKENS]. */
    val maxTokens: Int

    /**
     * A proposal takes microseconds, so it is asked even where nothing will be drafted, to learn how often it is right; others
     * are asked only where their drafts are expected to pay.
     */
    val isFree: Boolean

    /**
     * Up to [maxTokens] tokens after all of [sequence], the last of which the target has not run. The sequence is the caller's and
     * grows between two calls. A drafter with logits chooses by [sampler].
     */
    fun propose(sequence: IntList, maxTokens: Int, sampler: DraftSampler): Draft

    /** The target has gone back to its first [numTokens] tokens; 0 before another sequence. */
    fun rewind(numTokens: Int)
}

/** A drafter that reads no layers of its target. */
internal interface TokenDrafter : Drafter {
    override val layerIdxs: List<Int> get() = emptyList()

    override fun observe(position: Int, layerOutputs: Tensor): Unit = error("the drafter $name reads no layers")

    override fun bytesAt(numTokens: Int): Long = 0
}
