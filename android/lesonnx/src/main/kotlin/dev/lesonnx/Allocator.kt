package dev.lesonnx

const val PAGE_BYTES = 4096

/** The longest slab: a Java buffer ends below 2 GiB. So places in a slab fit an `Int`. */
const val SLAB_BYTES = 1L shl 30

/** Experts of one size. [slotBytes] is a whole number of pages; [routed] and [pinned] count experts. */
internal class SizeClass(val slotBytes: Long, val routed: Int, val pinned: Int)

/** One buffer of the cache: its [lengthBytes] now, cut into slots of [slotBytes]. */
data class Slab(val lengthBytes: Int, val slotBytes: Int)

/**
 * How many slots each class gets; together they never exceed [budgetBytes]. See `docs/scheduler.md`, "Where experts lie".
 *
 * [classes] ascend by size; [atOnce] is the most routed experts that one row of a layer requires. BudgetError when not
 * even one expert of the largest size fits.
 */
internal fun planSlots(budgetBytes: Long, classes: List<SizeClass>, atOnce: Int): IntArray {
    val pages = budgetBytes / PAGE_BYTES
    val sizes = LongArray(classes.size) { classes[it].slotBytes / PAGE_BYTES }
    val largestRouted = classes.indexOfLast { it.routed > 0 }.takeIf { it >= 0 } ?: classes.lastIndex
    var slots = IntArray(0)
    var rest = -1L
    for (pinned in listOf(classes.map { it.pinned }, classes.map { minOf(1, it.pinned) })) {
        slots = pinned.toIntArray()
        slots[largestRouted] += minOf(atOnce, classes[largestRouted].routed)
        rest = pages - slots.indices.sumOf { slots[it] * sizes[it] }
        if (rest >= 0) break
    }
    if (rest < 0) {
        val count = minOf(pages / sizes.last(), classes.sumOf { it.routed.toLong() + it.pinned }).toInt()
        if (count < 1) {
            throw BudgetError(
                "expert budget of $budgetBytes bytes: one expert takes ${classes.last().slotBytes} bytes",
            )
        }
        return IntArray(classes.size).also { it[it.lastIndex] = count }
    }
    val missing = LongArray(classes.size) { (classes[it].routed + classes[it].pinned - slots[it]).toLong() }
    val total = missing.indices.sumOf { missing[it] * sizes[it] }
    var left = rest
    for (i in slots.indices) {
        // With rest below total the product fits 64 bits; with more, all that is missing fits.
        val share = if (rest >= total) missing[i] else minOf(missing[i], rest * missing[i] / total)
        slots[i] += share.toInt()
        missing[i] -= share
        left -= share * sizes[i]
    }
    for (i in slots.indices.reversed()) {
        val more = minOf(missing[i], left / sizes[i])
        slots[i] += more.toInt()
        left -= more * sizes[i]
    }
    return slots
}

/**
 * Where experts lie in the cache: slots by class, in slabs that each hold one class.
 *
 * A slot is a number: those of class 0 first, then those of class 1, and so on. The budget given here is the largest there
 * will ever be, so slabs keep their numbers and never grow beyond their first length; a smaller budget takes slots away
 * from the end of every class, where a host can give memory back. It knows no experts, only sizes. Not thread-safe, owned
 * by the scheduler.
 */
internal class SlotAllocator(
    private val classes: List<SizeClass>,
    private val atOnce: Int,
    private val largestBudgetBytes: Long,
    slabBytes: Long = SLAB_BYTES,
) {
    private val counts: IntArray
    private val limit: IntArray // slots of each class in force
    private val base: IntArray // first slot of each class
    private val perSlab: IntArray
    private val classOf: IntArray
    private val slabOf: IntArray
    private val offsetOf: IntArray
    private val taken: BooleanArray
    private val free: Array<IntList>

    init {
        require(classes.isNotEmpty() && classes.all { it.slotBytes > 0 && it.slotBytes % PAGE_BYTES == 0L }) {
            "every class needs a size that is a whole number of pages"
        }
        require(classes.zipWithNext().all { (a, b) -> a.slotBytes < b.slotBytes }) { "classes must ascend by size" }
        val mostBytes = minOf(slabBytes, SLAB_BYTES)
        if (classes.last().slotBytes > mostBytes) {
            throw BudgetError("an expert of ${classes.last().slotBytes} bytes does not fit a slab of $slabBytes bytes")
        }
        counts = planSlots(largestBudgetBytes, classes, atOnce)
        limit = counts.copyOf()
        perSlab = IntArray(classes.size) { (mostBytes / classes[it].slotBytes).toInt() }
        base = IntArray(classes.size)
        for (i in 1 until classes.size) base[i] = base[i - 1] + counts[i - 1]
        val numSlots = counts.sum()
        classOf = IntArray(numSlots)
        slabOf = IntArray(numSlots)
        offsetOf = IntArray(numSlots)
        taken = BooleanArray(numSlots)
        var slab = 0
        for (i in classes.indices) {
            for (n in 0 until counts[i]) {
                val slot = base[i] + n
                classOf[slot] = i
                slabOf[slot] = slab + n / perSlab[i]
                offsetOf[slot] = (n % perSlab[i] * classes[i].slotBytes).toInt()
            }
            slab += (counts[i] + perSlab[i] - 1) / perSlab[i]
        }
        free = Array(classes.size) { i ->
            IntList(counts[i]).also { for (n in counts[i] - 1 downTo 0) it.add(base[i] + n) }
        }
    }

    fun sizeClass(slot: Int): Int = classOf[slot]

    fun slab(slot: Int): Int = slabOf[slot]

    fun offsetBytes(slot: Int): Int = offsetOf[slot]

    /** Every slab there will ever be, by number, with its present length (0: give it back). */
    fun slabs(): List<Slab> {
        val slabs = ArrayList<Slab>()
        for (i in classes.indices) {
            for (start in 0 until counts[i] step perSlab[i]) {
                var used = minOf(perSlab[i], counts[i] - start)
                while (used > 0 && start + used > limit[i] && !taken[base[i] + start + used - 1]) used--
                slabs.add(Slab((used * classes[i].slotBytes).toInt(), classes[i].slotBytes.toInt()))
            }
        }
        return slabs
    }

    /** Bytes of the slots in force, and of slots taken away whose expert is still needed. */
    fun committedBytes(): Long = classes.indices.sumOf { i ->
        val late = (base[i] + limit[i] until base[i] + counts[i]).count { taken[it] }
        (limit[i] + late) * classes[i].slotBytes
    }

    /** Whether a smaller budget has taken this slot away. */
    fun retired(slot: Int): Boolean = slot - base[classOf[slot]] >= limit[classOf[slot]]

    /** Whether [take] would find a slot. */
    fun hasFree(sizeClass: Int): Boolean {
        for (i in sizeClass until free.size) if (free[i].size > 0) return true
        return false
    }

    /** A free slot of the smallest class that holds [sizeClass], the latest given back; -1 if there is none. */
    fun take(sizeClass: Int): Int {
        for (i in sizeClass until free.size) {
            if (free[i].size > 0) return free[i].removeLast().also { taken[it] = true }
        }
        return -1
    }

    /** Give a slot back; one that was taken away by a smaller budget is gone. */
    fun release(slot: Int) {
        taken[slot] = false
        if (!retired(slot)) free[classOf[slot]].add(slot)
    }

    /** Plan again for another budget; whether a slot lies beyond, [retired] says. BudgetError changes nothing. */
    fun resize(budgetBytes: Long) {
        val planned = planSlots(minOf(budgetBytes, largestBudgetBytes), classes, atOnce)
        for (i in classes.indices) {
            limit[i] = minOf(planned[i], counts[i])
            val end = base[i] + limit[i]
            // Kept in the order of use, then what growth brought, so that the same events give the same places.
            val kept = (0 until free[i].size).map { free[i][it] }.filter { it < end }
            val known = kept.toSet()
            free[i].clear()
            for (slot in end - 1 downTo base[i]) if (!taken[slot] && slot !in known) free[i].add(slot)
            kept.forEach(free[i]::add)
        }
    }
}
