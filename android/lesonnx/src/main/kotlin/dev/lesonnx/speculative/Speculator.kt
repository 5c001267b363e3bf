package dev.lesonnx.speculative

import dev.lesonnx.IntList
import dev.lesonnx.Runner
import dev.lesonnx.Sampler

/**
 * Draft, price, verify: a sequence's next tokens, several at once where drafts are right, from one pass of the target over a token
 * and its drafts.
 *
 * It knows the runner's steps, a drafter and the clock; neither text nor when a generation ends but by its end tokens. Owns the
 * drafter and what was measured, which outlives a sequence; the runner is the caller's. Not thread-safe.
 */
internal class Speculator(private val runner: Runner, private val drafter: Drafter, private val pricing: Pricing = Pricing()) : AutoCloseable {
    /** The drafts of the generation that runs, or ran last. */
    var counts = DraftCounts()
        private set

    private var sequence = IntList()
    private var turnsOf: Samplers? = null

    // A draft that was not verified: its first token is held against the next one.
    private var unverified = Draft.NONE

    private class Samplers(val target: Sampler, val draft: DraftSampler)

    init {
        runner.layerReader = drafter
    }

    /** A generation from [promptIds] begins, with [sampler]; the runner keeps [numKept] tokens of its sequence. */
    fun begin(promptIds: IntArray, numKept: Int, sampler: Sampler) {
        counts = DraftCounts()
        sequence = IntList(promptIds.size).also { promptIds.forEach(it::add) }
        turnsOf = Samplers(sampler, DraftSampler(sampler))
        unverified = Draft.NONE
        drafter.rewind(numKept)
    }

    /** What a turn has found out before its pass. [draftUs]: null unless a drafter that costs ran. */
    private class Plan(val draft: Draft, val length: Int, val newBytes: LongArray, val draftUs: Long?)

    /**
     * The tokens after [token], the latest one, which the target has not run: at least one, at most [most].
     *
     * Ends behind one of [ends]. Afterwards the target has run [token] and those that were drafted and stay. What a pass meets is
     * thrown, and the sequence is then to be rewound.
     */
    fun next(token: Int, most: Int, ends: Set<Int>): IntArray {
        val samplers = checkNotNull(turnsOf) { "next before begin" }
        judgeUnverified(token)
        sequence.add(token)
        return run(token, plan(most, samplers.draft), samplers.target, ends).tokenIds
    }

    private fun plan(most: Int, sampler: DraftSampler): Plan {
        val asked = ask(minOf(most - 1, drafter.maxTokens))
        var draft = Draft.NONE
        var draftUs: Long? = null
        if (asked > 0) {
            val began = System.nanoTime()
            draft = drafter.propose(sequence, asked, sampler)
            if (!drafter.isFree) {
                val tookNs = System.nanoTime() - began
                counts = counts.copy(draftMs = counts.draftMs + tookNs / NS_PER_MS)
                draftUs = tookNs / NS_PER_US
            }
        }
        if (draft.tokenIds.isEmpty() || !pricing.mayDraft) return Plan(draft, 0, NO_BYTES, draftUs)
        val length = choose(draft, NO_BYTES)
        if (length == 0 || !streams) return Plan(draft, length, NO_BYTES, draftUs)
        val newBytes = newBytes(draft.tokenIds.size)
        return Plan(draft, choose(draft, newBytes), newBytes, draftUs)
    }

    /** How many tokens to have drafted. What a pass would read is looked at where it pays to draft without reads. */
    private fun ask(room: Int): Int {
        val asked = pricing.ask(room, drafter.isFree, NO_BYTES)
        return if (asked > 0 && !drafter.isFree && streams) pricing.ask(room, isFree = false, newBytes(room)) else asked
    }

    private fun choose(draft: Draft, newBytes: LongArray): Int =
        pricing.choose(draft.tokenIds.size, draft.confidence, drafter.isFree, draft.probabilities != null, newBytes)

    /** Whether a pass may have to read. */
    private val streams: Boolean get() = !runner.loader.keepsAll

    /** What each row of a pass with so many drafts is expected to add to what is read. */
    private fun newBytes(numDrafts: Int): LongArray = runner.loader.expectedNewBytes(numDrafts + 1)

    /** One pass over the token and the drafts that were chosen, and what it gives. */
    private fun run(token: Int, plan: Plan, sampler: Sampler, ends: Set<Int>): Verified {
        val length = plan.length
        if (length > 0) runner.prepareDrafts(length + 1)
        val before = runner.loader.telemetry
        val began = System.nanoTime()
        val verified = if (length > 0) {
            verified(token, plan, sampler, ends)
        } else {
            unverified = plan.draft
            Verified(intArrayOf(sampler.sample(runner.step(intArrayOf(token), FIRST_ROW))), 0)
        }
        val passUs = (System.nanoTime() - began) / NS_PER_US
        val after = runner.loader.telemetry
        val stallUs = ((after.stallMs - before.stallMs) * US_PER_MS).toLong()
        val readBytes = after.readBytes - before.readBytes
        pricing.passed(length + 1, passUs, stallUs, readBytes, plan.newBytes, verified.tokenIds.size, plan.draftUs)
        return verified
    }

    private fun verified(token: Int, plan: Plan, sampler: Sampler, ends: Set<Int>): Verified {
        val logits = runner.draftStep(intArrayOf(token) + plan.draft.tokenIds.copyOf(plan.length))
        val verified = verify(plan.draft, logits, sampler, ends)
        runner.keep(1 + verified.accepted)
        // Behind an end token nothing was judged.
        val judged = minOf(plan.length, verified.tokenIds.size)
        counts = counts.counting(judged, verified.accepted)
        pricing.judge(judged, verified.accepted, plan.draft.confidence)
        for (slot in 0 until verified.accepted) sequence.add(verified.tokenIds[slot])
        return verified
    }

    /** The token that came without drafts tells whether the draft's first one would have been right. */
    private fun judgeUnverified(token: Int) {
        if (unverified.tokenIds.isNotEmpty()) {
            pricing.judge(1, if (unverified.tokenIds[0] == token) 1 else 0, unverified.confidence)
        }
        unverified = Draft.NONE
    }

    /** Frees the drafter. */
    override fun close() {
        drafter.close()
    }

    private companion object {
        const val NS_PER_US = 1000L
        const val NS_PER_MS = 1e6
        const val US_PER_MS = 1e3
        val NO_BYTES = LongArray(0)
        val FIRST_ROW = intArrayOf(0)
    }
}
