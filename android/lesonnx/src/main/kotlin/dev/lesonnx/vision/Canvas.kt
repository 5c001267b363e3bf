package dev.lesonnx.vision

import dev.lesonnx.InputError
import dev.lesonnx.IntList
import dev.lesonnx.PICTURE_ROWS
import dev.lesonnx.VisionRecord

/**
 * Where a prompt's tokens are: text counts up, a picture's tokens lie on a canvas of heights and widths.
 *
 * Pure; the twin of `lesonnx/vision/canvas.py`. Immutable.
 */
internal class Canvas(private val vision: VisionRecord) {
    private val tokens = vision.tokens
    private val marks = tokens.run { setOf(imageStart, imageEnd, sliceStart, sliceEnd, newline) }

    /** The positions of a prompt's tokens (time, height, width), and the places of each picture's image tokens in it. */
    class Placed(val positions: Array<IntArray>, val imagePlaces: List<IntArray>)

    /**
     * Places [tokenIds], whose pictures, in order, have these views. The position of a token that follows is the greatest of them plus one.
     *
     * [InputError] where the prompt's image tokens and marks are not those of these pictures. Linear in the number of tokens.
     */
    fun place(tokenIds: IntArray, pictures: List<List<View>>): Placed {
        val positions = Array(PICTURE_ROWS) { IntArray(tokenIds.size) }
        val imageTokens = tokenIds.indices.filter { tokenIds[it] == tokens.image }
        val layouts = HashMap<List<View>, Layout>()
        val imagePlaces = ArrayList<IntArray>()
        var done = 0
        var next = 0
        var seen = 0
        for ((index, views) in pictures.withIndex()) {
            val layout = layouts.getOrPut(views) { layOut(views) }
            if (seen == imageTokens.size) throw InputError("the prompt has no image tokens for picture ${index + 1} of ${pictures.size}")
            val start = imageTokens[seen] - 1
            if (start < done || !layout.isAt(start, tokenIds)) {
                throw InputError(
                    "the prompt's image tokens at ${start + 1} are not those of picture ${index + 1}: expected ${layout.size} tokens with their" +
                        " marks, as its size gives them",
                )
            }
            next = countUp(positions, done, start, next)
            val origin = next
            for (place in 0 until layout.size) {
                positions[0][start + place] = origin
                positions[1][start + place] = maxOf(origin + layout.heights[place], 0)
                positions[2][start + place] = maxOf(origin + layout.widths[place], 0)
            }
            done = start + layout.size
            // Marks straight after a picture count as its own, up to those of the next one.
            while (done < tokenIds.size && tokenIds[done] in marks && tokenIds.getOrNull(done + 1) != tokens.image) {
                for (row in positions) row[done] = origin
                done++
            }
            next = origin + layout.extent + 1
            imagePlaces += layout.imagePlaces(start)
            seen += imagePlaces.last().size
        }
        if (seen != imageTokens.size) {
            throw InputError("the prompt has ${imageTokens.size} image tokens, expected $seen, those of ${pictures.size} pictures")
        }
        countUp(positions, done, tokenIds.size, next)
        return Placed(positions, imagePlaces)
    }

    /** Text from [start] to before [end]; gives the position after it. */
    private fun countUp(positions: Array<IntArray>, start: Int, end: Int, next: Int): Int {
        for (row in positions) for (place in start until end) row[place] = next + place - start
        return next + end - start
    }

    /** A picture's tokens with its marks, and their places from its origin. [extent] is the longer side of its canvas. */
    private inner class Layout(val ids: IntArray, val heights: IntArray, val widths: IntArray, val extent: Int) {
        val size: Int get() = ids.size

        fun isAt(start: Int, tokenIds: IntArray): Boolean =
            start + size <= tokenIds.size && ids.indices.all { ids[it] == tokenIds[start + it] }

        fun imagePlaces(start: Int): IntArray = ids.indices.filter { ids[it] == tokens.image }.map { start + it }.toIntArray()
    }

    private fun layOut(views: List<View>): Layout {
        val ids = IntList()
        val heights = IntList()
        val widths = IntList()
        fun put(token: Int, height: Int, width: Int) {
            ids.add(token)
            heights.add(height)
            widths.add(width)
        }
        val overview = views[0]
        val slices = views.getOrNull(1)
        val cell = slices ?: overview
        val cellHeight = cell.tokenRows(vision)
        val cellWidth = cell.tokenColumns(vision)
        val height = cell.rows * cellHeight
        val width = cell.columns * cellWidth
        put(tokens.imageStart, -1, -1)
        val across = spread(overview.tokenColumns(vision), width)
        for (down in spread(overview.tokenRows(vision), height)) for (right in across) put(tokens.image, down, right)
        put(tokens.imageEnd, height, width)
        for (sliceRow in 0 until (slices?.rows ?: 0)) {
            val top = sliceRow * cellHeight
            if (sliceRow > 0) put(tokens.newline, top - 1, width)
            for (sliceColumn in 0 until cell.columns) {
                val left = sliceColumn * cellWidth
                put(tokens.sliceStart, top, left)
                for (down in 0 until cellHeight) for (right in 0 until cellWidth) put(tokens.image, top + down, left + right)
                put(tokens.sliceEnd, top + cellHeight - 1, left + cellWidth - 1)
            }
        }
        return Layout(ids.toIntArray(), heights.toIntArray(), widths.toIntArray(), maxOf(height, width))
    }

    /**
     * [count] places in 0 to [length] - 1, both ends among them, evenly, each rounded, ties to even; 0 if it is one.
     *
     * In float32, counted from the nearer end, as the model's own code has it: the sum of what is rounded decides ties.
     */
    private fun spread(count: Int, length: Int): IntArray {
        if (count == 1) return intArrayOf(0)
        val last = (length - 1).toFloat()
        val step = last / (count - 1).toFloat()
        return IntArray(count) { index ->
            val place = if (index < count / 2) step * index.toFloat() else last - step * (count - 1 - index).toFloat()
            Math.rint(place.toDouble()).toInt()
        }
    }
}
