package dev.lesonnx

/** An entry orders experts by value, then by number: `value shl INDEX_BITS or expert`. */
internal const val INDEX_BITS = 20
internal const val INDEX_MASK = (1L shl INDEX_BITS) - 1

/** Above every entry. */
internal const val NONE = Long.MAX_VALUE

/**
 * Which expert lies in which slot, and which of those that may be evicted is worth least. Experts are numbered layer by
 * layer, a layer's shared one last.
 *
 * A value changes only when its layer is visited, so each layer keeps its evictable experts in ascending order, and the worst
 * of all is the least of the layers' firsts: no search through the cache. It knows no loads, steps or predictions. Not
 * thread-safe, owned by the scheduler.
 */
internal class Residency(layers: List<LayerShape>, budgetBytes: Long, policy: String, slabBytes: Long) {
    /** A layer's first expert. */
    val first = IntArray(layers.size)
    val cost: LongArray
    val layerOf: IntArray
    val policy: Policy

    /** Each expert's entry when its layer was last valued; that of a shared expert is above all others. */
    val entry: LongArray

    private val numExperts = IntArray(layers.size) { layers[it].numExperts }
    private val classOf: IntArray
    private val slots: SlotAllocator
    private val slot: IntArray
    private val values = LongArray(numExperts.max())

    // By slot class and layer: entries that may be evicted; and the least of them, NONE if there is none.
    private val evictable: Array<Array<SortedLongs>>
    private val firstEntry: Array<LongArray>

    init {
        var count = 0
        for ((layer, shape) in layers.withIndex()) {
            first[layer] = count
            count += shape.numExperts + if (shape.sharedCostBytes > 0) 1 else 0
        }
        require(count in 1..INDEX_MASK.toInt()) { "$count experts: expected 1 to $INDEX_MASK" }
        cost = LongArray(count)
        layerOf = IntArray(count)
        entry = LongArray(count) { it.toLong() }
        for ((layer, shape) in layers.withIndex()) {
            val shared = first[layer] + shape.numExperts
            cost.fill(shape.costBytes, first[layer], shared)
            layerOf.fill(layer, first[layer], shared)
            if (shape.sharedCostBytes > 0) {
                cost[shared] = shape.sharedCostBytes
                layerOf[shared] = layer
                entry[shared] = (TOP shl INDEX_BITS) or shared.toLong()
            }
        }
        val sizes = cost.distinct().sorted()
        classOf = IntArray(count) { sizes.binarySearch(cost[it]) }
        val classes = sizes.map { size ->
            SizeClass(
                size,
                layers.sumOf { if (it.costBytes == size) it.numExperts else 0 },
                layers.count { it.sharedCostBytes == size },
            )
        }
        val perTok = IntArray(layers.size) { layers[it].numExpertsPerTok }
        slots = SlotAllocator(classes, perTok.max(), budgetBytes, slabBytes)
        slot = IntArray(count) { -1 }
        this.policy = makePolicy(policy, numExperts, perTok)
        evictable = Array(sizes.size) { Array(layers.size) { SortedLongs() } }
        firstEntry = Array(sizes.size) { LongArray(layers.size) { NONE } }
    }

    // ---- values

    /** The layer was visited: take the policy's values and order its evictable experts, leaving out those [pinned]. */
    fun revalue(layer: Int, visit: Int, pinned: BooleanArray) {
        val first = first[layer]
        policy.values(layer, visit, values)
        for (e in 0 until numExperts[layer]) entry[first + e] = (values[e] shl INDEX_BITS) + (first + e)
        for (slotClass in evictable.indices) {
            val entries = evictable[slotClass][layer]
            if (entries.size == 0) continue
            entries.rewrite { old ->
                val expert = (old and INDEX_MASK).toInt()
                if (pinned[expert]) SortedLongs.DROP else entry[expert]
            }
            noteFirst(slotClass, layer)
        }
    }

    /**
     * For each of the coming [rows] the bytes of absent experts that it uses first, as far as odds tell: a row uses each expert
     * with the policy's odds, whatever other rows use.
     */
    fun expectedNewBytes(rows: Int, isAbsent: (expert: Int) -> Boolean): LongArray {
        val newBytes = LongArray(rows)
        val odds = LongArray(numExperts.max())
        for (layer in numExperts.indices) {
            policy.odds(layer, odds)
            for (e in 0 until numExperts[layer]) {
                val expert = first[layer] + e
                if (!isAbsent(expert)) continue
                var firstUse = odds[e]
                for (row in newBytes.indices) {
                    newBytes[row] += cost[expert] * firstUse
                    firstUse = (firstUse * (ONE - odds[e])) shr ODDS_BITS
                }
            }
        }
        for (row in newBytes.indices) newBytes[row] = newBytes[row] shr ODDS_BITS
        return newBytes
    }

    /** The least entry of evictable experts whose slots hold [expert]; -NONE if a slot is free, NONE for none. */
    fun worst(expert: Int): Long {
        if (slots.hasFree(classOf[expert])) return -NONE
        var worst = NONE
        for (slotClass in classOf[expert] until firstEntry.size) {
            for (entry in firstEntry[slotClass]) if (entry < worst) worst = entry
        }
        return worst
    }

    /** From here on this expert may be evicted. */
    fun offer(expert: Int) {
        val slotClass = slots.sizeClass(slot[expert])
        evictable[slotClass][layerOf[expert]].add(entry[expert])
        noteFirst(slotClass, layerOf[expert])
    }

    /** This expert may not be evicted any more, or is about to be. */
    fun withdraw(expert: Int) {
        val slotClass = slots.sizeClass(slot[expert])
        evictable[slotClass][layerOf[expert]].remove(entry[expert])
        noteFirst(slotClass, layerOf[expert])
    }

    private fun noteFirst(slotClass: Int, layer: Int) {
        val entries = evictable[slotClass][layer]
        firstEntry[slotClass][layer] = if (entries.size > 0) entries[0] else NONE
    }

    // ---- places

    /** Give the expert a free slot, which there must be. */
    fun take(expert: Int) {
        slot[expert] = slots.take(classOf[expert])
    }

    fun release(expert: Int) {
        slots.release(slot[expert])
        slot[expert] = -1
    }

    fun slab(expert: Int): Int = slots.slab(slot[expert])

    fun offsetBytes(expert: Int): Int = slots.offsetBytes(slot[expert])

    /** Whether a smaller budget has taken the expert's slot away. */
    fun retired(expert: Int): Boolean = slots.retired(slot[expert])

    /** Plan the slots for another budget; gives the evictable experts that lie beyond it, ascending. */
    fun resize(budgetBytes: Long): IntArray {
        slots.resize(budgetBytes)
        val beyond = IntList()
        for (byLayer in evictable) for (entries in byLayer) for (index in 0 until entries.size) {
            val expert = (entries[index] and INDEX_MASK).toInt()
            if (retired(expert)) beyond.add(expert)
        }
        return beyond.toIntArray().also { it.sort() }
    }

    fun slabs(): List<Slab> = slots.slabs()

    fun committedBytes(): Long = slots.committedBytes()
}
