package dev.lesonnx

import java.nio.FloatBuffer

private const val SCORE_BITS = 20

/** No score is beyond; a score of +-1024. */
internal const val SCORE_LIMIT = 1 shl 30

/** Predictions of a layer are told apart as the first since its last visit and any later one. */
private const val MOMENTS = 2

/** Of more rows, only the last ones are ranked: together they name most of what the chunk needs. */
private const val PREDICTED_ROWS = 32
private const val FIRST_ODDS = ONE * 5 / 8
private const val EXTRA_ODDS = ONE / 4
private const val ODDS_SHIFT = 4

internal const val FULL = 64
private const val USEFUL = 1
private const val WASTED = -1
private const val SLOWED = -2
private const val RECOVERY_VISITS = 64
private const val SLOW_FACTOR = 2
private const val READ_SHIFT = 4

/**
 * Router scores [T,E] (the buffer's remaining floats) as the fixed point of the scheduler: 20 fractional bits, rounded half
 * to even, clipped to +-2**30; what is not a number counts as the least. The one place where a float becomes an integer;
 * done in 64 bits, where the product is exact. The buffer's position does not move.
 */
fun fixedScores(scores: FloatBuffer): IntArray {
    val start = scores.position()
    return IntArray(scores.remaining()) { index ->
        val scaled = Math.rint(scores.get(start + index).toDouble() * (1 shl SCORE_BITS))
        if (scaled.isNaN()) -SCORE_LIMIT else scaled.coerceIn(-SCORE_LIMIT.toDouble(), SCORE_LIMIT.toDouble()).toInt()
    }
}

/** Experts of a layer (`expert_idx`) that a prediction names, best first, each with its rank. */
internal class Ranked(val experts: IntArray, val ranks: IntArray) {
    val size: Int get() = experts.size

    /** Those that [keep] keeps, in their order. */
    inline fun filter(keep: (Int) -> Boolean): Ranked {
        val kept = experts.indices.filter { keep(experts[it]) }
        return Ranked(IntArray(kept.size) { experts[kept[it]] }, IntArray(kept.size) { ranks[kept[it]] })
    }
}

/**
 * How far a prediction is trusted: measured odds that the expert of a given rank is used, by layer and moment; and a
 * throttle that turns speculation down. See `docs/scheduler.md`, "Lookahead".
 *
 * The odds are learned from every prediction, loaded or not, so speculation that was turned down knows when it would pay
 * again. It knows nothing of memory or loads under way. Not thread-safe, owned by the scheduler.
 */
internal class Lookahead(private val numExperts: IntArray, private val numExpertsPerTok: IntArray) {
    /** Share of the speculative bytes allowed, of [FULL]. */
    var level = FULL
        private set

    // Scores become keys that sort by score, then by lower expert: no sort of pairs, no question of stability.
    private val indexBits = 32 - numExperts.max().countLeadingZeroBits()
    private val mask = (1L shl indexBits) - 1
    private val ranks = IntArray(numExperts.size) {
        minOf(numExperts[it], numExpertsPerTok[it] + (numExpertsPerTok[it] + 1) / 2)
    }
    private val odds = Array(numExperts.size) { layer ->
        Array(MOMENTS) { IntArray(ranks[layer]) { rank -> if (rank < numExpertsPerTok[layer]) FIRST_ODDS else EXTRA_ODDS } }
    }

    // By layer and moment: what was named that is not in memory.
    private val named = Array(numExperts.size) { arrayOfNulls<Ranked>(MOMENTS) }
    private var visits = 0
    private var usPerMib = 0L // demand reads with no speculative read beside them; 0: none seen
    private val keys = LongArray(numExperts.max())

    /**
     * The experts that fixed-point [scores] [T,E] name, best rank first. A row ranks by descending score, ties by ascending
     * expert; over several rows an expert counts with its best rank, ties by ascending expert.
     */
    fun rank(layer: Int, scores: IntArray): Ranked {
        val n = numExperts[layer]
        val rows = scores.size / n
        val count = ranks[layer]
        if (rows == 1) {
            sortKeys(scores, 0, n)
            return Ranked(IntArray(count) { expertAt(n - 1 - it) }, IntArray(count) { it })
        }
        val best = IntArray(n) { count }
        for (row in maxOf(0, rows - PREDICTED_ROWS) until rows) {
            sortKeys(scores, row * n, n)
            for (rank in 0 until count) {
                val expert = expertAt(n - 1 - rank)
                if (rank < best[expert]) best[expert] = rank
            }
        }
        val experts = IntList(n)
        for (rank in 0 until count) for (expert in 0 until n) if (best[expert] == rank) experts.add(expert)
        return Ranked(experts.toIntArray(), IntArray(experts.size) { best[experts[it]] })
    }

    private fun sortKeys(scores: IntArray, start: Int, n: Int) {
        for (e in 0 until n) keys[e] = (scores[start + e].toLong() shl indexBits) or (mask - e)
        keys.sort(0, n)
    }

    private fun expertAt(place: Int): Int = (mask - (keys[place] and mask)).toInt()

    /** What a prediction named that is not in memory: to be judged at the layer's visit. Gives the odds by rank. */
    fun note(layer: Int, absent: Ranked): IntArray {
        val named = named[layer]
        val moment = if (named[0] == null) 0 else 1
        named[moment] = absent
        return odds[layer][moment]
    }

    /** The layer was visited and its rows used these experts: learn the odds, forget the predictions. */
    fun observe(layer: Int, used: IntArray) {
        visits++
        if (visits % RECOVERY_VISITS == 0) level = minOf(FULL, level + 1)
        for (moment in 0 until MOMENTS) {
            val ranked = named[layer][moment] ?: continue
            val odds = odds[layer][moment]
            for (index in 0 until ranked.size) {
                val target = if (ranked.experts[index] in used) ONE else 0
                odds[ranked.ranks[index]] += (target - odds[ranked.ranks[index]]) shr ODDS_SHIFT
            }
        }
        named[layer].fill(null)
    }

    /** A speculative load was used at its layer's visit, or was not. */
    fun outcome(useful: Boolean) {
        level = (level + if (useful) USEFUL else WASTED).coerceIn(0, FULL)
    }

    /** A demand load took [readUs]; [beside]: a speculative one was under way when it began. */
    fun demandRead(costBytes: Long, readUs: Long, beside: Boolean) {
        val taken = (readUs shl 20) / costBytes
        if (beside) {
            if (usPerMib != 0L && taken > SLOW_FACTOR * usPerMib) level = maxOf(0, level + SLOWED)
        } else if (usPerMib == 0L) {
            usPerMib = taken
        } else {
            usPerMib += (taken - usPerMib) shr READ_SHIFT
        }
    }
}
