package dev.lesonnx.speculative

import dev.lesonnx.Sampler
import dev.lesonnx.Sampler.Distribution

/** The tokens that come next, at least one. The first [accepted] of them are drafts, which the target has run. */
internal class Verified(val tokenIds: IntArray, val accepted: Int)

/**
 * Which drafted tokens stay, and the token after them: the output is the target's own, whoever drafted.
 *
 * [logits] are float32 rows of [V]: row j is the target's after the draft's first j tokens; there may be fewer than were drafted.
 * The sampler's penalty sees a row's accepted drafts, and is as before at the end: the caller accepts what stays, as after
 * [Sampler.sample]. A token of [ends] is the last in any case: nothing is drawn behind it.
 *
 * Drafts that were chosen, not drawn: each row is sampled as without drafts, and a draft stays where it is that token. So tokens
 * are those of plain decoding, draw for draw. Drafts drawn from q: accepted with min(1, p/q), and in place of the first rejected
 * one a token is drawn from max(0, p - q); so tokens have the target's distribution p.
 *
 * `docs/speculation.md` states the arithmetic, which every host follows. Sources: Leviathan, Kalman and Matias, "Fast Inference
 * from Transformers via Speculative Decoding", 2023; Chen et al., "Accelerating Large Language Model Decoding with Speculative
 * Sampling", 2023. Throws what [Sampler.sample] throws.
 */
internal fun verify(draft: Draft, logits: List<FloatArray>, sampler: Sampler, ends: Set<Int> = emptySet()): Verified {
    val accepted = ArrayList<Int>()
    try {
        for (row in 0 until minOf(draft.tokenIds.size, logits.size - 1)) {
            val drafted = draft.tokenIds[row]
            val token = if (draft.probabilities == null || sampler.options.temperature == 0.0) {
                sampler.sample(logits[row])
            } else {
                acceptOrRedraw(drafted, sampler.distribution(logits[row]), draft.probabilities[row], sampler)
            }
            if (token != drafted) return Verified((accepted + token).toIntArray(), row)
            if (token in ends) return Verified((accepted + token).toIntArray(), row + 1)
            sampler.accept(token)
            accepted += token
        }
        return Verified((accepted + sampler.sample(logits.last())).toIntArray(), accepted.size)
    } finally {
        accepted.forEach(sampler::retract)
    }
}

/** The drafted token with min(1, p/q), else one of the residual, which the drafted one is not in. */
private fun acceptOrRedraw(drafted: Int, target: Distribution, proposal: Distribution, sampler: Sampler): Int {
    val p = target.probabilityOf(drafted)
    val q = proposal.probabilityOf(drafted)
    if (sampler.random.uniform() * q < p) return drafted
    val taken = HashMap<Int, Double>(2 * proposal.ids.size)
    for (index in proposal.ids.indices) taken[proposal.ids[index]] = proposal.probabilities[index]
    var weights = DoubleArray(target.ids.size) { maxOf(target.probabilities[it] - (taken[target.ids[it]] ?: 0.0), 0.0) }
    // The rejected token has p < q, so its residual is 0: it is cut off, as a last one that rounding leaves must not be it.
    var kept = weights.indices.filter { weights[it] > 0 }
    if (kept.isEmpty()) {
        // p and q are the same but for rounding: one draw all the same, from p without the rejected token.
        kept = target.ids.indices.filter { target.ids[it] != drafted }
        weights = target.probabilities
    }
    return draw(IntArray(kept.size) { target.ids[kept[it]] }, DoubleArray(kept.size) { weights[kept[it]] }, sampler.random)
}

/** The token's probability; 0 where it is not there. */
private fun Distribution.probabilityOf(token: Int): Double = ids.indexOf(token).let { if (it < 0) 0.0 else probabilities[it] }
