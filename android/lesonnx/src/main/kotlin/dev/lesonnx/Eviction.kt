package dev.lesonnx

/** The policies by name: what an expert in memory is worth. */
val POLICIES = listOf("lru", "lfu", "les")

/** The fractional bits of all averages and odds. */
internal const val ODDS_BITS = 14

/** Certainty, in the fixed point of all averages and odds (14 fractional bits). */
const val ONE = 1 shl ODDS_BITS

/** Of a longer chunk, only this many last rows teach: what came before has faded anyway. */
private const val LEARNED_ROWS = 64

private const val FOLLOWER_SHIFT = 3
private const val RECENT_SHIFT = 1
private const val LASTING_SHIFT = 4
private const val FOLLOWER_WEIGHT = 2
private const val RECENT_WEIGHT = 1
private const val LASTING_WEIGHT = 1
private const val TOTAL_WEIGHT = FOLLOWER_WEIGHT + RECENT_WEIGHT + LASTING_WEIGHT

/** Waiting one whole cycle in memory costs 1/20 of a certain use. */
private const val WAIT_DIVISOR = 20

/** Above every value that is learned: pinned experts, and what `lfu` thinks of a prediction. */
internal const val TOP = 1L shl 42

/**
 * What an expert in memory is worth: signed integers, in size at most [TOP]; the smaller is evicted first.
 *
 * A policy learns which experts the rows of each visit to a layer used, and values every expert of that layer; it knows
 * neither sizes nor states. The value of an expert changes only when its own layer is visited. Not thread-safe, owned by
 * the scheduler.
 */
internal interface Policy {
    /** Take in the experts (`expert_idx`) that these consecutive rows, from [from] to before [to], used at this layer. */
    fun learn(layer: Int, rows: Array<IntArray>, from: Int, to: Int)

    /** Write the value of each routed expert of the layer, whose last visit had this number, to the front of [into]. */
    fun values(layer: Int, visit: Int, into: LongArray)

    /** Write how likely each routed expert of the layer is used by the next row, of [ONE], to the front of [into]. */
    fun odds(layer: Int, into: LongArray)

    /**
     * The value of an absent expert that has [odds] of [ONE] to be used at the layer's next [visit]; [clock] is the number
     * of the latest visit of any layer.
     */
    fun predicted(odds: Int, visit: Int, clock: Int): Long
}

/** What `lru` and `lfu` share: they foretell nothing, so one expert is as likely as another. */
internal abstract class EvenPolicy(private val numExperts: IntArray, private val numExpertsPerTok: IntArray) : Policy {
    override fun odds(layer: Int, into: LongArray) =
        into.fill(ONE.toLong() * numExpertsPerTok[layer] / numExperts[layer], 0, numExperts[layer])
}

/** The least recently used goes first: the value is the visit of the last use. */
internal class LruPolicy(numExperts: IntArray, numExpertsPerTok: IntArray) : EvenPolicy(numExperts, numExpertsPerTok) {
    private val last = Array(numExperts.size) { LongArray(numExperts[it]) }
    private val learned = Array(numExperts.size) { BooleanArray(numExperts[it]) }

    override fun learn(layer: Int, rows: Array<IntArray>, from: Int, to: Int) {
        for (row in from until to) for (expert in rows[row]) learned[layer][expert] = true
    }

    override fun values(layer: Int, visit: Int, into: LongArray) {
        val last = last[layer]
        val learned = learned[layer]
        for (expert in last.indices) if (learned[expert]) last[expert] = visit.toLong()
        learned.fill(false)
        last.copyInto(into)
    }

    override fun predicted(odds: Int, visit: Int, clock: Int): Long = clock.toLong()
}

/** The least often used goes first: the value is the number of rows that used it. */
internal class LfuPolicy(numExperts: IntArray, numExpertsPerTok: IntArray) : EvenPolicy(numExperts, numExpertsPerTok) {
    private val count = Array(numExperts.size) { LongArray(numExperts[it]) }

    override fun learn(layer: Int, rows: Array<IntArray>, from: Int, to: Int) {
        for (row in from until to) for (expert in rows[row]) count[layer][expert]++
    }

    override fun values(layer: Int, visit: Int, into: LongArray) {
        count[layer].copyInto(into)
    }

    override fun predicted(odds: Int, visit: Int, clock: Int): Long = TOP
}

/**
 * What is least likely to be used at its layer's next visit goes first; the farther that visit, the sooner.
 *
 * value = odds of use at the next visit - price * (number of that visit), where the odds are a weighted sum of three moving
 * averages: what followed the experts used now (a mean over them), recent use, and lasting use. See `docs/scheduler.md`,
 * "What an expert is worth".
 */
internal class LesPolicy(private val numExperts: IntArray, private val numExpertsPerTok: IntArray) : Policy {
    // Followers are a mean over k experts; multiplying by a common multiple of every k leaves no division.
    private val scale: Long = numExpertsPerTok.fold(1L) { all, k -> leastCommonMultiple(all, k.toLong()) }
    private val price: Long = maxOf(1, TOTAL_WEIGHT * scale * ONE / (WAIT_DIVISOR.toLong() * numExperts.size))

    // [num_experts + 2, num_experts] of ONE, row-major: row e what is used one row after expert e is, then recent and lasting.
    private val tables = Array(numExperts.size) { layer ->
        val n = numExperts[layer]
        ShortArray((n + 2) * n).also { table ->
            table.fill((ONE.toLong() * numExpertsPerTok[layer] / n).toInt().toShort(), (n + 1) * n, (n + 2) * n)
        }
    }
    private val latest = Array(numExperts.size) { IntArray(0) } // what the last row used
    private val target = ShortArray(numExperts.max()) // ONE where the row in hand uses the expert

    override fun learn(layer: Int, rows: Array<IntArray>, from: Int, to: Int) {
        val n = numExperts[layer]
        for (place in maxOf(from, to - LEARNED_ROWS) until to) {
            val row = rows[place]
            for (expert in row) target[expert] = ONE.toShort()
            for (expert in latest[layer]) move(tables[layer], expert * n, n, FOLLOWER_SHIFT)
            move(tables[layer], n * n, n, RECENT_SHIFT)
            move(tables[layer], (n + 1) * n, n, LASTING_SHIFT)
            for (expert in row) target[expert] = 0
            latest[layer] = row.copyOf()
        }
    }

    private fun move(table: ShortArray, start: Int, n: Int, shift: Int) {
        for (e in 0 until n) {
            val average = table[start + e].toInt()
            table[start + e] = (average + ((target[e] - average) shr shift)).toShort()
        }
    }

    override fun values(layer: Int, visit: Int, into: LongArray) {
        val waiting = price * (visit + numExperts.size)
        weigh(layer, into)
        for (e in 0 until numExperts[layer]) into[e] -= waiting
    }

    override fun odds(layer: Int, into: LongArray) {
        weigh(layer, into)
        for (e in 0 until numExperts[layer]) into[e] = minOf(into[e] / (TOTAL_WEIGHT * scale), ONE.toLong())
    }

    /** The odds of each expert, [TOTAL_WEIGHT] times the scale too large. */
    private fun weigh(layer: Int, into: LongArray) {
        val n = numExperts[layer]
        val table = tables[layer]
        val recent = RECENT_WEIGHT * scale
        val lasting = LASTING_WEIGHT * scale
        for (e in 0 until n) into[e] = recent * table[n * n + e] + lasting * table[(n + 1) * n + e]
        val follower = FOLLOWER_WEIGHT * scale / numExpertsPerTok[layer]
        for (expert in latest[layer]) for (e in 0 until n) into[e] += follower * table[expert * n + e]
    }

    override fun predicted(odds: Int, visit: Int, clock: Int): Long = TOTAL_WEIGHT * scale * odds - price * visit
}

private fun leastCommonMultiple(a: Long, b: Long): Long {
    var divisor = a
    var rest = b
    while (rest != 0L) divisor = rest.also { rest = divisor % rest }
    return a / divisor * b
}

/** The policy of that name for layers of these many experts, [numExpertsPerTok] of them a row. InputError: unknown name. */
internal fun makePolicy(name: String, numExperts: IntArray, numExpertsPerTok: IntArray): Policy = when (name) {
    "lru" -> LruPolicy(numExperts, numExpertsPerTok)
    "lfu" -> LfuPolicy(numExperts, numExpertsPerTok)
    "les" -> LesPolicy(numExperts, numExpertsPerTok)
    else -> throw InputError("unknown policy '$name': expected one of ${POLICIES.joinToString()}")
}
