package dev.lesonnx.speculative

import dev.lesonnx.ONE

/**
 * How often drafts are right: the odds that a draft's slot is accepted, given that all slots before it are. Measured by position
 * and by the drafter's own confidence.
 *
 * It knows no tokens and no time: integers, as `docs/speculation.md` states them. Not thread-safe, owned by [Pricing].
 */
internal class Acceptance {
    private val byPosition = Array(MAX_DRAFT_TOKENS) { Counts() }
    private val byConfidence = Array(NUM_BINS) { Counts() }

    // By position, made anew with each judgement; what is not known of a slot is taken from the one before it.
    private val odds = IntArray(MAX_DRAFT_TOKENS) { FIRST_ODDS }

    /** Of [ONE]: by the slot's confidence where the drafter gives one, else by position. */
    fun odds(slot: Int, confidence: IntArray?): Int {
        if (confidence == null) return odds[slot]
        val number = bin(confidence[slot])
        // A drafter's word counts half until it is measured, which costs nothing: unverified drafts are judged too.
        val middle = (number shl CONFIDENCE_SHIFT) + (1 shl CONFIDENCE_SHIFT shr 1)
        return byConfidence[number].odds(middle / 2)
    }

    /** Of [drafted] tokens the first [accepted] were right; behind the first wrong one nothing is known. */
    fun judge(drafted: Int, accepted: Int, confidence: IntArray?) {
        for (slot in 0 until minOf(drafted, accepted + 1)) {
            byPosition[slot].judge(slot < accepted)
            if (confidence != null) byConfidence[bin(confidence[slot])].judge(slot < accepted)
        }
        var before = FIRST_ODDS
        for (slot in odds.indices) {
            before = byPosition[slot].odds(before)
            odds[slot] = before
        }
    }

    private fun bin(confidence: Int) = minOf(confidence shr CONFIDENCE_SHIFT, NUM_BINS - 1)

    /** How many drafts of one kind were judged and how many were right, both fading. */
    private class Counts {
        private var judged = 0
        private var right = 0

        /** Of [ONE]; the prior counts as [PRIOR_SAMPLES] drafts. */
        fun odds(prior: Int): Int = (right * ONE + PRIOR_SAMPLES * prior) / (judged + PRIOR_SAMPLES)

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
        const val FIRST_ODDS = ONE / 2
        const val PRIOR_SAMPLES = 2

        /** Counts are halved when so many have been judged, so what is long ago fades. */
        const val COUNT_LIMIT = 64
        const val CONFIDENCE_SHIFT = 10
        const val NUM_BINS = ONE shr CONFIDENCE_SHIFT
    }
}
