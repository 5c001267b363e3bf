package dev.lesonnx.vision

import dev.lesonnx.VisionRecord

/**
 * One way in which a picture is looked at: the whole of it resized to [height] x [width] pixels and cut into a grid of [rows] x [columns]
 * crops. The overview's grid is 1 x 1. Immutable.
 */
data class View(val height: Int, val width: Int, val rows: Int = 1, val columns: Int = 1) {
    val numCrops: Int get() = rows * columns

    /** The pixels of a crop. */
    val cropHeight: Int get() = height / rows
    val cropWidth: Int get() = width / columns

    /** The image tokens along the sides of a crop. */
    internal fun tokenRows(vision: VisionRecord): Int = cropHeight / vision.tokenPixels

    internal fun tokenColumns(vision: VisionRecord): Int = cropWidth / vision.tokenPixels

    /** The image tokens of a crop. */
    internal fun cropTokens(vision: VisionRecord): Int = tokenRows(vision) * tokenColumns(vision)

    /** The image tokens of all crops. */
    internal fun numTokens(vision: VisionRecord): Int = numCrops * cropTokens(vision)
}
