package dev.lesonnx.speculative

import dev.lesonnx.REWINDABLE_TOKENS

/**
 * How long a pass takes: microseconds by its rows and by the bytes that its rows but the first are expected to add. A pass is what
 * it computes and what it waits for reads.
 *
 * A pass of several rows is held as a ratio to one of a single row at that time, so what slows both down (another program, heat, a
 * longer context) leaves it right. What is known of passes bounds it: wider ones are not quicker, and as long as a width is
 * not settled, a further row does not cost more than those before it. It knows no clock: integers, as `docs/speculation.md` states them. Not thread-safe, owned by [Pricing].
 */
internal class PassTimes {
    private val one = Recent()
    private val ratios = HashMap<Int, Recent>() // by rows
    private val table = LongArray(REWINDABLE_TOKENS + 1) { RATIO_ONE }
    private val least = table.copyOf() // of a width and all wider ones

    // Fading sums over passes of one row: their number, their waiting, what they read.
    private var passes = 0L
    private var numPlain = 0
    private var stallUs = 0L
    private var readBytes = 0L

    // And over passes of several: what they waited longer, and what their further rows were expected to add.
    private var extraStallUs = 0L
    private var extraBytes = 0L

    init {
        tabulate()
    }

    /** Whether enough passes of one row were measured: without them there is nothing to compare with. */
    val isKnown: Boolean get() = one.isSettled && (readBytes == 0L || numPlain >= WARM_PASSES)

    /** What was measured of passes of so many rows counts no more. */
    fun forget(rows: Int) {
        ratios.remove(rows)
    }

    /**
     * A pass is over. [stallUs] of it were spent waiting for reads; [readBytes] were read meanwhile. [newBytes]: what each row was
     * expected to add, the first one's own first; used of passes of several rows.
     */
    fun took(rows: Int, passUs: Long, stallUs: Long, readBytes: Long, newBytes: LongArray) {
        val computeUs = maxOf(1, passUs - stallUs)
        if (rows == 1) {
            one.add(computeUs)
            if (numPlain < WARM_PASSES) numPlain++
            passes += PASS_ONE - (passes shr PLAIN_FADE_SHIFT)
            this.stallUs += stallUs - (this.stallUs shr PLAIN_FADE_SHIFT)
            this.readBytes += readBytes - (this.readBytes shr PLAIN_FADE_SHIFT)
            return
        }
        if (!isKnown) return
        ratios.getOrPut(rows, ::Recent).add(maxOf(RATIO_ONE, computeUs * RATIO_ONE / one.median))
        tabulate()
        extraStallUs += stallUs - meanStallUs() - (extraStallUs shr FADE_SHIFT)
        extraBytes += addedBytes(rows, newBytes) - (extraBytes shr FADE_SHIFT)
    }

    /** What a pass of [rows] is expected to take if its rows but the first add [addedBytes]. */
    fun passUs(rows: Int, addedBytes: Long = 0): Long {
        val computeUs = one.median * table[rows] / RATIO_ONE
        val waitedUs = maxOf(0, PRIOR_PASSES * meanStallUs() + extraStallUs)
        return computeUs + meanStallUs() + addedBytes * waitedUs / maxOf(1, PRIOR_PASSES * meanReadBytes() + extraBytes)
    }

    /** The least that a pass of [rows] or more is expected to take. */
    fun leastUs(rows: Int): Long = one.median * least[rows] / RATIO_ONE + meanStallUs()

    /** What a pass of one row waits. */
    private fun meanStallUs(): Long = stallUs * PASS_ONE / maxOf(1, passes)

    /** What a pass of one row reads. */
    private fun meanReadBytes(): Long = readBytes * PASS_ONE / maxOf(1, passes)

    /** By rows, a pass of so many by one of a single row: measured, or between measured ones; within bounds. */
    private fun tabulate() {
        for (rows in 2 until table.size) {
            var ratio = measured(rows)
            val isSettled = ratios[rows]?.isSettled == true
            for ((width, recent) in ratios) {
                if (width == rows || !recent.isSettled) continue
                if (width > rows) ratio = minOf(ratio, recent.median) else if (!isSettled) ratio = minOf(ratio, beyond(rows, width))
            }
            table[rows] = ratio
        }
        for (rows in table.indices.reversed()) least[rows] = if (rows + 1 < table.size) minOf(table[rows], least[rows + 1]) else table[rows]
    }

    /** The ratio that was measured, or that on the line through measured neighbours. */
    private fun measured(rows: Int): Long {
        ratios[rows]?.let { return it.median }
        val above = ratios.keys.filter { it > rows }.minOrNull()
        val below = ratios.keys.filter { it < rows }.maxOrNull() ?: 1
        if (above == null) return beyond(rows, below)
        val low = if (below > 1) ratios.getValue(below).median else RATIO_ONE
        return low + Math.floorDiv((ratios.getValue(above).median - low) * (rows - below), above - below)
    }

    /** The ratio on the line from the single row through a narrower width, where further rows cost something. */
    private fun beyond(rows: Int, width: Int): Long {
        if (width == 1) return RATIO_ONE + RATIO_ONE * (rows - 1) * UNKNOWN_ROW_EIGHTHS / 8
        val recent = ratios.getValue(width)
        val least = if (recent.isSettled) LEAST_ROW_EIGHTHS else UNKNOWN_ROW_EIGHTHS
        val line = (recent.median - RATIO_ONE) * (rows - width) / (width - 1)
        return recent.median + maxOf(line, RATIO_ONE * (rows - width) * least / 8)
    }

    /** The last few values and their median: of an even number the lower one. */
    private class Recent {
        private val values = ArrayDeque<Long>()
        var median = 0L
            private set

        /** One odd value cannot sway it. */
        val isSettled: Boolean get() = values.size >= SETTLED

        fun add(value: Long) {
            if (values.size == RECENT) values.removeFirst()
            values.addLast(value)
            median = values.sorted()[(values.size - 1) / 2]
        }
    }

    companion object {
        /** The median of the last so many passes of a width counts. */
        private const val RECENT = 5
        private const val SETTLED = 3
        private const val RATIO_ONE = 1L shl 10

        /**
         * Beyond what was measured a further row is taken to cost no less than 3/8 of a single one's pass, and 1/8 where what was measured
         * is settled: a few quick passes of two rows do not make those of twelve free.
         */
        private const val UNKNOWN_ROW_EIGHTHS = 3
        private const val LEAST_ROW_EIGHTHS = 1

        /** What further rows wait for the bytes that they add is begun with what so many plain passes wait for theirs. */
        private const val PRIOR_PASSES = 2L

        /** Where passes read, so many plain ones come before anything is compared with them: a cold cache makes them wait. */
        private const val WARM_PASSES = 24
        private const val FADE_SHIFT = 5
        private const val PLAIN_FADE_SHIFT = 4
        private const val PASS_ONE = 1L shl 10

        /** What the rows of a pass but the first were expected to add, of what is known. */
        fun addedBytes(rows: Int, newBytes: LongArray): Long {
            var sum = 0L
            for (row in 1 until minOf(rows, newBytes.size)) sum += newBytes[row]
            return sum
        }
    }
}
