package dev.lesonnx

/**
 * Chooses tokens for one sequence; owns the random numbers and what the repetition penalty has seen. `lesonnx/sampling.py`
 * has the steps by number, which every host follows in the same order, one IEEE 754 operation at a time: equal logits give
 * equal tokens, bit for bit.
 *
 * Not thread-safe: one sequence, one sampler. [sample] does not accept: the caller accepts the prompt's tokens and every token
 * that stays, so that a draft can be tried and taken back.
 */
class Sampler(val options: SamplingOptions) {
    internal val random = Pcg32(options.seed)
    private val seen = HashMap<Int, Int>()
    private var scores = FloatArray(0) // of the call in hand, by token
    private var greatest = 0f

    /** Count a token of the prompt or of the output for the repetition penalty. */
    fun accept(token: Int) {
        if (token < 0) throw InputError("token id is $token, expected at least 0")
        seen.merge(token, 1, Int::plus)
    }

    /** [accept] each. */
    fun acceptAll(tokens: IntArray) = tokens.forEach(::accept)

    /** Take back one [accept] of this token; InputError where there was none. */
    fun retract(token: Int) {
        val count = seen[token] ?: throw InputError("token $token was never accepted, so it cannot be taken back")
        if (count == 1) seen.remove(token) else seen[token] = count - 1
    }

    /**
     * The next token's id from [logits] [V]: one draw, or none when greedy. -inf excludes a token. The array is not changed.
     *
     * @throws InputError for no logits at all
     * @throws LesonnxError for NaN, +inf or nothing but -inf
     */
    fun sample(logits: FloatArray): Int {
        score(logits)
        if (options.temperature == 0.0) return scores.indexOfFirst { it == greatest }
        if (isFiltered()) {
            val left = filtered()
            return draw(left.ids, left.weights, random.uniform() * sum(left.weights)) ?: left.ids.last()
        }
        val target = random.uniform() * sum(allWeights())
        var last = 0
        for (ids in growingOrders()) {
            val weights = weights(ids)
            draw(ids, weights, target)?.let { return it }
            last = ids[weights.indexOfLast { it > 0 }]
        }
        return last
    }

    /** Token ids in order, each with its probability, above 0. */
    class Distribution internal constructor(val ids: IntArray, val probabilities: DoubleArray)

    /** What [sample] would draw from, without drawing; greedy gives one id with probability 1. Errors as [sample]. */
    fun distribution(logits: FloatArray): Distribution {
        score(logits)
        if (options.temperature == 0.0) {
            return Distribution(intArrayOf(scores.indexOfFirst { it == greatest }), doubleArrayOf(1.0))
        }
        val left: Weighted
        val kept: Double
        if (isFiltered()) {
            left = filtered()
            kept = sum(left.weights)
        } else {
            left = cut(order(scores.size), 0.0)
            kept = sum(allWeights())
        }
        return Distribution(left.ids, DoubleArray(left.weights.size) { left.weights[it] / kept })
    }

    /** Step 1: checks and penalises the logits, as a copy without -0. */
    private fun score(logits: FloatArray) {
        if (logits.isEmpty()) throw InputError("logits are [0], expected [V]")
        if (scores.size != logits.size) scores = FloatArray(logits.size)
        for (token in logits.indices) scores[token] = logits[token] + 0f
        val penalty = options.repetitionPenalty
        if (penalty != 1.0) {
            for (token in seen.keys) {
                if (token >= scores.size) continue
                val wide = scores[token].toDouble()
                scores[token] = (if (wide > 0) wide / penalty else wide * penalty).toFloat() + 0f
            }
        }
        greatest = Float.NEGATIVE_INFINITY
        for (score in scores) greatest = maxOf(greatest, score) // NaN wins
        if (!greatest.isFinite()) {
            val what = if (greatest.isNaN()) "NaN" else if (greatest > 0) "+inf" else "nothing but -inf"
            throw LesonnxError("logits hold $what: the model's output is broken, so no token can be chosen")
        }
    }

    private fun isFiltered(): Boolean = options.topK in 1 until scores.size || options.topP < 1 || options.minP > 0

    /** Step 3. */
    private fun weight(token: Int): Double =
        expNonPositive((scores[token].toDouble() - greatest.toDouble()) / options.temperature)

    private fun weights(ids: IntArray) = DoubleArray(ids.size) { weight(ids[it]) }

    private fun allWeights() = DoubleArray(scores.size, ::weight)

    /** Tokens with their weights. */
    private class Weighted(val ids: IntArray, val weights: DoubleArray)

    /** Steps 4 to 6: what is left, in order; at least one token, and no weight 0. */
    private fun filtered(): Weighted {
        if (options.topK in 1 until scores.size) {
            val ids = order(options.topK)
            if (options.topP == 1.0) return cut(ids, options.minP)
            val weights = weights(ids)
            return cut(ids.copyOf(reach(weights, options.topP * sum(weights)) ?: ids.size), options.minP)
        }
        val goal = if (options.topP < 1) options.topP * sum(allWeights()) else Double.POSITIVE_INFINITY
        var ids = IntArray(0)
        for (longer in growingOrders()) {
            ids = longer
            val weights = weights(ids)
            val count = reach(weights, goal)
            if (count != null) return cut(ids.copyOf(count), options.minP)
            // Step 6 goes no farther than weights that are great enough.
            if (weights.last() < options.minP) break
        }
        return cut(ids, options.minP)
    }

    /** The longest beginning with weights of at least [minP], and above 0. */
    private fun cut(ids: IntArray, minP: Double): Weighted {
        val weights = weights(ids)
        val count = weights.indexOfFirst { it < minP || it == 0.0 }.let { if (it < 0) ids.size else it }
        return Weighted(ids.copyOf(count), weights.copyOf(count))
    }

    /** The sum, one by one from the first. */
    private fun sum(weights: DoubleArray): Double {
        var running = 0.0
        for (weight in weights) running += weight
        return running
    }

    /** How many weights from the first on reach the goal; null where all together do not. */
    private fun reach(weights: DoubleArray, goal: Double): Int? {
        var running = 0.0
        for (index in weights.indices) {
            running += weights[index]
            if (running >= goal) return index + 1
        }
        return null
    }

    /** Step 7: the first token whose running sum exceeds the target. */
    private fun draw(ids: IntArray, weights: DoubleArray, target: Double): Int? {
        var running = 0.0
        for (index in weights.indices) {
            running += weights[index]
            if (running > target) return ids[index]
        }
        return null
    }

    /** Step 2: the first [count] ids of the order, sorting few others. */
    private fun order(count: Int): IntArray {
        val candidates = LongArrayBuilder(count)
        val worst = if (count < scores.size) worstBucket(count) else LAST_BUCKET
        for (token in scores.indices) {
            val key = descending(scores[token])
            if (key ushr BUCKET_SHIFT <= worst) candidates.add((key.toLong() shl 32) or token.toLong())
        }
        val keys = candidates.sorted()
        return IntArray(count) { keys[it].toInt() }
    }

    /** The bucket (the upper bits of [descending] scores) in which the order's first [count] ids end. */
    private fun worstBucket(count: Int): Int {
        val sizes = IntArray(LAST_BUCKET + 1)
        for (score in scores) sizes[descending(score) ushr BUCKET_SHIFT]++
        var bucket = 0
        var before = sizes[0]
        while (before < count) before += sizes[++bucket]
        return bucket
    }

    /** Longer and longer beginnings of the order; the last is all of it. Most draws need only the first. */
    private fun growingOrders(): Sequence<IntArray> = sequence {
        var count = FIRST_CANDIDATES
        while (count < scores.size) {
            yield(order(count))
            count *= GROWTH
        }
        yield(order(scores.size))
    }

    private companion object {
        /** The length of the order that is tried first; each further try takes [GROWTH] times as many. */
        const val FIRST_CANDIDATES = 256
        const val GROWTH = 16
        const val BUCKET_SHIFT = 16
        const val LAST_BUCKET = 0xFFFF

        /** A score's bits so that they ascend, unsigned, as scores descend. */
        fun descending(score: Float): Int {
            val bits = score.toRawBits()
            return if (bits < 0) bits else bits.inv() and 0x7FFFFFFF
        }
    }

    /** Keys whose upper half is to be compared unsigned. */
    private class LongArrayBuilder(capacity: Int) {
        private var items = LongArray(capacity + 64)
        private var size = 0

        fun add(item: Long) {
            if (size == items.size) items = items.copyOf(2 * size)
            items[size++] = item xor Long.MIN_VALUE
        }

        fun sorted(): LongArray = items.also { it.sort(0, size) }
    }
}

private const val LOG2_E = 1.4426950408889634

// Cody and Waite's two-part logarithm of 2 as fdlibm has it: the low 21 bits of the first part are zero, so its product with
// any exponent is exact.
private const val LN2_HIGH = 6.93147180369123816490e-01
private const val LN2_LOW = 1.90821492927058770002e-10

/** Below it the result is 0, so no host meets a subnormal number. */
private const val LEAST_EXPONENT = -700.0

/** 1/13!, 1/12!, ..., 1/0!, each rounded once. */
private val TAYLOR = DoubleArray(14) { index ->
    var factorial = 1L
    for (factor in 2L..13L - index) factorial *= factor
    1.0 / factorial
}

/**
 * e**x for x <= 0, the same bits on every host; 0 below -700. With `k = floor(x * log2(e) + 0.5)` and
 * `r = (x - k * ln2_high) - k * ln2_low`, it is the Taylor polynomial of degree 13 in r by Horner's rule, times 2**k, which is
 * exact. Only + - * and floor are used, each rounded once. Within 2 units in the last place of the true value.
 */
internal fun expNonPositive(x: Double): Double {
    if (x < LEAST_EXPONENT) return 0.0
    val k = Math.floor(x * LOG2_E + 0.5)
    val r = (x - k * LN2_HIGH) - k * LN2_LOW
    var value = TAYLOR[0]
    for (index in 1 until TAYLOR.size) {
        value *= r
        value += TAYLOR[index]
    }
    return value * Double.fromBits((k.toLong() + 1023) shl 52)
}
