package dev.lesonnx.speculative

import dev.lesonnx.ODDS_BITS
import dev.lesonnx.ONE

/**
 * How many drafted tokens to verify: as many as make tokens come fastest by measured acceptance and measured time, none where
 * drafting does not pay; bounded in what a wrong choice can cost.
 *
 * For each token of the sequence: [ask] how many tokens a drafter should propose, [choose] how many of its draft to verify, and
 * [passed] when the pass is over; [judge] what became of drafts. Integers and no clock: the host says what passes took, so the golden
 * vectors replay on every host; `docs/speculation.md` states the arithmetic. Not thread-safe, owned by a speculator.
 */
internal open class Pricing {
    val acceptance = Acceptance()
    val times = PassTimes()
    private var meanDraftUs = 0L

    // What turns with a draft that cost lost on the mean; below 0: gained.
    private var trendUs = 0L
    private var debtUs = 0L
    private var sincePlain = 0
    private var sinceDraft = 0
    private var interval = FIRST_INTERVAL
    private var isProbe = false
    private var wasOdd = false // whether the last pass with drafts took far longer than expected

    /** Whether a length above 0 is possible at all: else nothing that it would be chosen by need be found out. */
    open val mayDraft: Boolean
        get() = times.isKnown && sincePlain < PLAIN_AGAIN_PASSES && debtUs <= SLACK_PASSES * times.passUs(1)

    /**
     * How many tokens to have drafted, at most [most]; 0: the drafter is not asked. [newBytes]: what each of [most] + 1 rows is
     * expected to add to what is read; empty where that is not known.
     */
    open fun ask(most: Int, isFree: Boolean, newBytes: LongArray): Int {
        isProbe = false
        if (isFree || most < 1) return most
        // Where it should pay by what slots are worth on the whole and has not, drafts are paid for, then not verified.
        if (trendUs > 0 && sinceDraft < interval) return 0
        val length = longest(Offer(most, null, newBytes, expectedDraftUs(), inOrder = false))
        isProbe = isProbe || (length > 0 && trendUs > 0)
        return length
    }

    /**
     * How many of [drafted] tokens to verify. Other values as in [ask]; a draft that was paid for counts no more.
     *
     * [isDrawn]: the tokens were drawn, so the choice may not depend on what comes behind the slot it is about, or the target's
     * distribution would be lost: it stops at the first drop.
     */
    open fun choose(drafted: Int, confidence: IntArray?, isFree: Boolean, isDrawn: Boolean, newBytes: LongArray): Int {
        if (drafted < 1) return 0
        val offer = Offer(drafted, confidence, newBytes, draftUs = 0, inOrder = isDrawn)
        return if (isFree) longest(offer) else best(offer, least = if (isProbe) 1 else 0)
    }

    /** A pass is over, with what it took and gave. [draftUs]: null unless a drafter that costs ran. */
    fun passed(rows: Int, passUs: Long, stallUs: Long, readBytes: Long, newBytes: LongArray, newTokens: Int, draftUs: Long?) {
        val plainUs = times.passUs(1)
        // What another program did to a pass is not the drafts' fault: it happens to plain ones too. What happens twice in a row is.
        val mostUs = MOST_CHARGED * times.passUs(rows, PassTimes.addedBytes(rows, newBytes))
        val chargedUs = if (wasOdd) passUs else minOf(passUs, mostUs)
        if (rows > 1 || draftUs != null) wasOdd = passUs > mostUs
        // It was tried since what is known of it may be wrong.
        if (isProbe) times.forget(rows)
        times.took(rows, passUs, stallUs, readBytes, newBytes)
        sincePlain = if (rows == 1) 0 else sincePlain + 1
        if (debtUs > 0) debtUs = maxOf(0, debtUs - (passUs shr ALLOWANCE_SHIFT))
        if (rows == 1 && draftUs == null) {
            sinceDraft++
            return
        }
        sinceDraft = 0
        val lostUs = chargedUs + (draftUs ?: 0) - newTokens * plainUs
        settle(lostUs, plainUs)
        if (draftUs != null) drafted(draftUs, lostUs, plainUs)
    }

    /** A pass with drafts lost so much against plain ones, or gained. */
    private fun settle(lostUs: Long, plainUs: Long) {
        debtUs = maxOf(debtUs + lostUs, -CREDIT_PASSES * plainUs)
        if (lostUs <= 0) interval = FIRST_INTERVAL else if (isProbe) interval = minOf(2 * interval, LAST_INTERVAL)
    }

    /** A drafter that costs took so long, and the turn lost so much. */
    private fun drafted(draftUs: Long, lostUs: Long, plainUs: Long) {
        val beforeUs = if (trendUs != 0L) trendUs else -TREND_PASSES * plainUs
        trendUs = if (isProbe) lostUs else beforeUs + ((lostUs - beforeUs) shr DRAFT_FADE_SHIFT)
        meanDraftUs += if (meanDraftUs != 0L) (draftUs - meanDraftUs) shr DRAFT_FADE_SHIFT else draftUs
    }

    /** What became of a draft's first [drafted] tokens: verified, or held against what came without them. */
    fun judge(drafted: Int, accepted: Int, confidence: IntArray?) = acceptance.judge(drafted, accepted, confidence)

    /** What a length is chosen by: up to [most] tokens that would still take [draftUs] to draft. */
    private class Offer(val most: Int, val confidence: IntArray?, val newBytes: LongArray, val draftUs: Long, val inOrder: Boolean)

    /** The best length where nothing has been paid yet; none where the debt is too large, a probe now and then. */
    private fun longest(offer: Offer): Int {
        if (!mayDraft) return 0
        val length = best(offer, least = 0)
        if (length > 0 || sinceDraft < interval) return length
        if (acceptance.odds(0, offer.confidence) < PROBE_ODDS) return 0
        isProbe = true
        return best(offer, least = 1)
    }

    /** The length from [least] on with most expected tokens by expected time. */
    private fun best(offer: Offer, least: Int): Int {
        var best = 0
        var bestGain = ONE.toLong()
        var bestUs = times.passUs(1)
        var survival = ONE.toLong()
        var gain = ONE.toLong()
        var extraBytes = 0L
        for (length in 1..offer.most) {
            survival = (survival * acceptance.odds(length - 1, offer.confidence)) shr ODDS_BITS
            gain += survival
            if (offer.newBytes.isNotEmpty()) extraBytes += offer.newBytes[length]
            val us = times.passUs(length + 1, extraBytes) + offer.draftUs
            // The first length must beat drafting nothing clearly, unless it is wanted in any case.
            val margin = if (best == 0) MARGIN + 1 else MARGIN
            if ((best == 0 && least == 1) || gain * bestUs * MARGIN > bestGain * us * margin) {
                best = length
                bestGain = gain
                bestUs = us
            } else if (offer.inOrder) {
                break
            }
            // No length behind can have more than all of its tokens, or take less than the least.
            if (length == offer.most) break
            val leastUs = times.leastUs(length + 2) + offer.draftUs
            if ((gain + survival * (offer.most - length)) * bestUs <= bestGain * leastUs) break
        }
        return best
    }

    private fun expectedDraftUs(): Long = if (meanDraftUs != 0L) meanDraftUs else times.passUs(1) shr UNKNOWN_DRAFT_SHIFT

    private companion object {
        /** Drafting must be faster by one part in so many, since what it is compared with is measured roughly. */
        const val MARGIN = 8L

        /** After so many passes with drafts one runs without, to measure again what they are compared with. */
        const val PLAIN_AGAIN_PASSES = 64

        /** Drafts may cost at most one part in 64 of all time, beyond what they gain. */
        const val ALLOWANCE_SHIFT = 6

        /** A pass counts for at most so many times what it was expected to take, if the one with drafts before it did not. */
        const val MOST_CHARGED = 2L

        /** In plain passes: what drafts may cost at once, and how much of what they gained counts against later losses. */
        const val SLACK_PASSES = 4L
        const val CREDIT_PASSES = 16L

        /** Where drafting does not pay, it is tried again after so many passes; each time in vain doubles them. */
        const val FIRST_INTERVAL = 32
        const val LAST_INTERVAL = 2048
        const val PROBE_ODDS = ONE / 4

        /** As long as no draft was measured, one is taken to cost an eighth of a plain pass. */
        const val UNKNOWN_DRAFT_SHIFT = 3
        const val DRAFT_FADE_SHIFT = 3

        /** Plain passes that a drafter that costs is taken to gain each time, before it is known. */
        const val TREND_PASSES = 2L
    }
}
