package dev.lesonnx

/** A list of ints without boxes: the scheduler runs for every layer of every token. Not thread-safe. */
internal class IntList(capacity: Int = 16) {
    private var items = IntArray(maxOf(capacity, 4))

    var size = 0
        private set

    operator fun get(index: Int): Int = items[index]

    fun add(item: Int) = insert(size, item)

    fun insert(index: Int, item: Int) {
        if (size == items.size) items = items.copyOf(2 * size)
        items.copyInto(items, index + 1, index, size)
        items[index] = item
        size++
    }

    fun removeAt(index: Int): Int {
        val item = items[index]
        items.copyInto(items, index, index + 1, size)
        size--
        return item
    }

    fun removeLast(): Int = removeAt(size - 1)

    /** Takes the item out where it is first found. */
    fun remove(item: Int) {
        var index = 0
        while (items[index] != item) index++
        removeAt(index)
    }

    fun clear() {
        size = 0
    }

    fun toIntArray(): IntArray = items.copyOf(size)
}

/** Longs in ascending order, none of them twice. Not thread-safe. */
internal class SortedLongs {
    private var items = LongArray(16)

    var size = 0
        private set

    operator fun get(index: Int): Long = items[index]

    fun add(item: Long) {
        val place = -1 - items.binarySearch(item, 0, size)
        check(place >= 0) { "$item is there already" }
        if (size == items.size) items = items.copyOf(2 * size)
        items.copyInto(items, place + 1, place, size)
        items[place] = item
        size++
    }

    fun remove(item: Long) {
        val place = items.binarySearch(item, 0, size)
        check(place >= 0) { "$item is not there" }
        items.copyInto(items, place, place + 1, size)
        size--
    }

    /** Puts what [change] gives in the place of each item, nothing where it gives [DROP]; sorts again. */
    inline fun rewrite(change: (Long) -> Long) {
        var kept = 0
        for (index in 0 until size) {
            val item = change(items[index])
            if (item != DROP) items[kept++] = item
        }
        size = kept
        items.sort(0, kept)
    }

    companion object {
        const val DROP = Long.MIN_VALUE
    }
}
