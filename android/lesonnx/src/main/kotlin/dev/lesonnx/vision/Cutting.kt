package dev.lesonnx.vision

import dev.lesonnx.InputError
import dev.lesonnx.VisionRecord
import kotlin.math.abs
import kotlin.math.ceil
import kotlin.math.floor
import kotlin.math.ln
import kotlin.math.sqrt

/**
 * How a picture of some size is looked at: whole, and in slices where it has more pixels than one view has.
 *
 * Pure; the twin of `lesonnx/vision/cutting.py`, all in float64 and in its order of operations. Immutable.
 */
internal class Cutting(private val vision: VisionRecord) {
    private val scale = vision.scaleResolution
    private val unit = vision.tokenPixels

    private class Size(val height: Int, val width: Int)

    /**
     * The image tokens of the largest crop: twice those of a square one. Sides are never less than a token, so a crop grows without bound as
     * a picture gets narrower; this bounds what the tower needs of memory.
     */
    val maxCropTokens: Long = ceil(scale.toDouble() / unit).toLong().let { 2 * it * it }

    /**
     * The overview and, of a picture that is sliced, its slices; [InputError] for a picture without pixels, and for one so narrow that a
     * crop would have more than [maxCropTokens].
     */
    fun views(height: Int, width: Int): List<View> {
        if (height < 1 || width < 1) throw InputError("a picture has at least one pixel, found $width x $height")
        val found = cut(height, width)
        for (view in found) {
            val rows = view.tokenRows(vision)
            val columns = view.tokenColumns(vision)
            if (rows.toLong() * columns > maxCropTokens) {
                throw InputError(
                    "a picture of $width x $height pixels is too narrow: a crop of it would have $columns x $rows image tokens," +
                        " expected at most $maxCropTokens",
                )
            }
        }
        return found
    }

    /** [views] without its bound: what the model's own processor does with any size. */
    private fun cut(height: Int, width: Int): List<View> {
        val most = minOf(ceil(width.toDouble() * height / (scale.toDouble() * scale)), vision.maxSliceNums.toDouble()).toInt()
        if (most <= 1) return listOf(fit(height, width, isForced = true).let { View(it.height, it.width) })
        val overview = fit(height, width, isForced = false)
        val (rows, columns) = grid(height, width, most)
        val cell = fit(share(height, rows), share(width, columns), isForced = true)
        return listOf(View(overview.height, overview.width), View(rows * cell.height, columns * cell.width, rows, columns))
    }

    /** Sides that are whole tokens, about [scale] squared pixels: of smaller pictures only if [isForced]. */
    private fun fit(height: Int, width: Int, isForced: Boolean): Size {
        if (!isForced && height.toLong() * width <= scale.toLong() * scale) return Size(whole(height), whole(width))
        val ratio = width.toDouble() / height
        val fittedHeight = floor(scale / sqrt(ratio))
        val fittedWidth = floor(fittedHeight * ratio)
        return Size(whole(fittedHeight.toInt()), whole(fittedWidth.toInt()))
    }

    /** The nearest multiple of a token's pixels, ties to even, at least one. */
    private fun whole(side: Int): Int = maxOf(Math.rint(side.toDouble() / unit).toInt() * unit, unit)

    private fun share(side: Int, count: Int): Int = maxOf(Math.rint(side.toDouble() / count).toInt(), 1)

    /** Rows and columns of about [most] slices, whose shape is nearest to the picture's. */
    private fun grid(height: Int, width: Int, most: Int): Pair<Int, Int> {
        val wanted = ln(width.toDouble() / height)
        var best = 1 to 1
        var least = Double.POSITIVE_INFINITY
        for (count in most - 1..most + 1) {
            if (count == 1 || count > vision.maxSliceNums) continue
            for (rows in 1..count) {
                if (count % rows != 0) continue
                val columns = count / rows
                val distance = abs(wanted - ln(columns.toDouble() / rows))
                if (distance < least || (distance == least && rows > best.first)) {
                    best = rows to columns
                    least = distance
                }
            }
        }
        return best
    }
}
