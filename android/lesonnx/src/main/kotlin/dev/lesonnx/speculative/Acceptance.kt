package dev.lesonnx.speculative

import dev.lesonnx.ONE

/**
 * How often drafts are right: the odds that a draft's slot is accepted, given that all slots before it are. Measured by position
 * and by the drafter's own confidence.
 *
 * It knows no tokens and no time: integers, as `docs/speculation.md` states them. Not thread-safe, owned by [Pricing].
 */
internal class Acceptance {
    private val byPosition = Array(MAX_DRAFT_TOKENS) { Counts(ONE / 2) }

    // A drafter's word counts half until it is measured: that costs nothing, since unverified drafts are judged too.
    private val byConfidence = Array(NUM_BINS) { number -> Counts(((number shl CONFIDENCE_SHIFT) + (1 shl CONFIDENCE_SHIFT shr 1)) / 2) }

    /** Of [ONE]: by the slot's confidence where the drafter gives one, else by position. */
    fun odds(slot: Int, confidence: IntArray?): Int = counts(slot, confidence).odds

    /** Of [drafted] tokens the first [accepted] were right; behind the first wrong one nothing is known. */
    fun judge(drafted: Int, accepted: Int, confidence: IntArray?) {
        for (slot in 0 until minOf(drafted, accepted + 1)) {
            byPosition[slot].judge(slot < accepted)
            if (confidence != null) counts(slot, confidence).judge(slot < accepted)
        }
    }

    private fun counts(slot: Int, confidence: IntArray?): Counts =
        if (confidence == null) byPosition[slot] else byConfidence[minOf(confidence[slot] shr CONFIDENCE_SHIFT, NUM_BINS - 1)]

    /** How many drafts of one kind were judged and how many were right, both fading; of [prior] odds before any. */
    private class Counts(private val prior: Int) {
        private var judged = 0
        private var right = 0

        /** Of [ONE]; the prior counts as [PRIOR_SAMPLES] drafts. */
        val odds: Int get() = (right * ONE + PRIOR_SAMPLES * prior) / (judged + PRIOR_SAMPLES)

        fun judge(isRight: Boolean) {
            judged++
            if (isRight) right++
            if (judged == COUNT_LIMIT) {
                judged = judged shr 1
                right = right shr 1
            }
        }
    }

    private companion object {
        const val PRIOR_SAMPLES = 2

        /** Counts are halved when so many have been judged, so what is long ago fades. */
        const val COUNT_LIMIT = 64
        const val CONFIDENCE_SHIFT = 10
        const val NUM_BINS = ONE shr CONFIDENCE_SHIFT
    }
}
