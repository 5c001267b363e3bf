package dev.lesonnx.speculative

import dev.lesonnx.ONE
import dev.lesonnx.Pcg32
import dev.lesonnx.Sampler
import dev.lesonnx.Sampler.Distribution

/**
 * Chooses a draft's tokens as the target would: the same options and repetition penalty, random numbers apart.
 *
 * [proposal] is one draft: what it has accepted for the penalty is taken back at its end. Not thread-safe; holds the target's
 * sampler, owns its random numbers.
 */
internal class DraftSampler(private val sampler: Sampler) {
    private val random = Pcg32(sampler.options.seed, DRAFT_STREAM)

    /** Whether tokens are drawn: then a draft has probabilities. */
    val draws: Boolean get() = sampler.options.temperature > 0

    /** A token, and what it was drawn from; null where it was chosen. */
    class Choice(val token: Int, val distribution: Distribution?)

    /** Tokens chosen one after another, each of which counts for those after it until [block] ends. */
    fun proposal(block: (choose: (logits: FloatArray) -> Choice) -> Unit) {
        val accepted = ArrayList<Int>()
        try {
            block { logits -> choose(logits).also { sampler.accept(it.token); accepted += it.token } }
        } finally {
            accepted.forEach(sampler::retract)
        }
    }

    private fun choose(logits: FloatArray): Choice {
        if (!draws) return Choice(sampler.sample(logits), null)
        val distribution = sampler.distribution(logits)
        return Choice(draw(distribution.ids, distribution.probabilities, random), distribution)
    }
}

/**
 * One draw u: the first id whose running sum of [weights], in order, exceeds `u * total`, with the sum over all as total. Where
 * rounding leaves none, the last one.
 */
internal fun draw(ids: IntArray, weights: DoubleArray, random: Pcg32): Int {
    var total = 0.0
    for (weight in weights) total += weight
    val target = random.uniform() * total
    var running = 0.0
    for (index in weights.indices) {
        running += weights[index]
        if (running > target) return ids[index]
    }
    return ids.last()
}

/** A probability as a confidence, of [ONE]: `floor(p * ONE + 0.5)` in float64, from 0 to [ONE]; 0 for NaN. */
internal fun fixedConfidence(probability: Double): Int =
    if (probability.isNaN()) 0 else Math.floor(probability * ONE + 0.5).coerceIn(0.0, ONE.toDouble()).toInt()
