package dev.lesonnx.speculative

import dev.lesonnx.IntList
import dev.lesonnx.ONE

/** A single token that was there before foretells too little. */
internal const val LEAST_MATCH = 2

/** Longer matches are as good as one of this length: of them the most recent counts. */
internal const val MOST_MATCH = 16

/** Earlier places that are looked at, the most recent ones. */
internal const val MOST_CANDIDATES = 16

/**
 * The drafter `ngram`: finds the longest suffix of the sequence that occurs earlier, in the prompt or in the output, and proposes
 * what followed it. It knows tokens and no model; `docs/speculation.md` states it exactly.
 *
 * Each token is indexed once: the place where its pair (the token before it and itself) ended last, chained to the place before
 * that. Memory is two numbers a token; a proposal looks at [MOST_CANDIDATES] places at most. Not thread-safe.
 */
internal class NgramDrafter : TokenDrafter {
    override val name = "ngram"
    override val maxTokens = MAX_DRAFT_TOKENS
    override val isFree = true

    // By pair, the last place where it ends; by place, the one before with the same pair.
    private val last = HashMap<Long, Int>()
    private val before = IntList()

    /** As [Drafter.propose]; [sampler] is not used: there is nothing to choose by. */
    override fun propose(sequence: IntList, maxTokens: Int, sampler: DraftSampler): Draft {
        if (sequence.size < before.size) rewind(0)
        index(sequence)
        val match = longestMatch(sequence)
        if (match.length < LEAST_MATCH || maxTokens < 1) return Draft.NONE
        val known = sequence.size - 1 - match.end
        val drafted = IntArray(maxTokens)
        // A copy may run into what it has just written: a period goes on.
        for (slot in drafted.indices) drafted[slot] = if (slot < known) sequence[match.end + 1 + slot] else drafted[slot - known]
        // With every token that is right, the match is one longer.
        val confidence = IntArray(maxTokens) { slot ->
            val matched = minOf(match.length + slot, MOST_MATCH)
            ONE * matched / (matched + 1)
        }
        return Draft(drafted, confidence = confidence)
    }

    /** Takes in what has come since the last call. */
    private fun index(sequence: IntList) {
        for (place in before.size until sequence.size) {
            if (place == 0) {
                before.add(NOWHERE)
                continue
            }
            val pair = (sequence[place - 1].toLong() shl 32) or sequence[place].toLong()
            before.add(last.put(pair, place) ?: NOWHERE)
        }
    }

    /** Where an earlier match of the suffix ends, and its length. */
    private class Match(val end: Int, val length: Int)

    /** The longest one, the most recent of equals; of length 0 where there is none. */
    private fun longestMatch(sequence: IntList): Match {
        val end = sequence.size - 1
        var best = Match(NOWHERE, 0)
        var place = if (end >= 0) before[end] else NOWHERE
        var candidates = 0
        while (place >= 0 && candidates++ < MOST_CANDIDATES && best.length < MOST_MATCH) {
            var length = LEAST_MATCH // the pair is the same
            while (length < MOST_MATCH && length <= place && sequence[place - length] == sequence[end - length]) length++
            if (length > best.length) best = Match(place, length)
            place = before[place]
        }
        return best
    }

    /** Forgets everything where the sequence becomes shorter than what is indexed: the next proposal begins anew. */
    override fun rewind(numTokens: Int) {
        if (numTokens >= before.size) return
        last.clear()
        before.clear()
    }

    override fun close() = Unit

    private companion object {
        const val NOWHERE = -1
    }
}
