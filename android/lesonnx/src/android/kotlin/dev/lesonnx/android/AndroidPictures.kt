package dev.lesonnx.android

import android.graphics.Bitmap
import android.graphics.ColorSpace
import android.graphics.ImageDecoder
import dev.lesonnx.InputError
import dev.lesonnx.vision.Picture
import java.io.IOException
import kotlin.math.sqrt

/** Pictures of more pixels are decoded smaller: nine slices of 448 x 448 are fewer still, and the heap is small. */
private const val MOST_PIXELS = 4_000_000

/**
 * A picture as Android decodes it, of a file, a document or a photo of the picker: upright, in sRGB, alpha left out, the first frame of
 * several, at most 4 megapixels. Takes a while: not on the main thread. [InputError] in one line for what is no picture, is broken,
 * cannot be reached, or does not fit in memory.
 */
fun readPicture(source: ImageDecoder.Source): Picture = try {
    val bitmap = ImageDecoder.decodeBitmap(source) { decoder, info, _ ->
        decoder.allocator = ImageDecoder.ALLOCATOR_SOFTWARE
        decoder.isUnpremultipliedRequired = true
        decoder.setTargetColorSpace(ColorSpace.get(ColorSpace.Named.SRGB))
        val numPixels = info.size.width.toLong() * info.size.height
        if (numPixels > MOST_PIXELS) {
            val share = sqrt(MOST_PIXELS.toDouble() / numPixels)
            decoder.setTargetSize(maxOf((info.size.width * share).toInt(), 1), maxOf((info.size.height * share).toInt(), 1))
        }
    }
    try {
        Picture(bitmap.height, bitmap.width, rgb(bitmap))
    } finally {
        bitmap.recycle()
    }
} catch (error: ImageDecoder.DecodeException) {
    throw InputError("not a picture that Android can decode, or a broken one", error)
} catch (error: IOException) {
    throw InputError("the picture cannot be read: ${reason(error)}", error)
} catch (error: RuntimeException) { // what its provider throws, SecurityException where the app may not open it any more
    throw InputError("the picture cannot be read: ${reason(error)}", error)
} catch (_: OutOfMemoryError) {
    throw InputError("the picture does not fit in memory")
}

private fun reason(error: Exception) = (error.message ?: error.javaClass.simpleName).trim().split(Regex("\\s+")).joinToString(" ").take(200)

private fun rgb(bitmap: Bitmap): ByteArray {
    val pixels = ByteArray(Picture.CHANNELS * bitmap.width * bitmap.height)
    val row = IntArray(bitmap.width)
    var place = 0
    for (y in 0 until bitmap.height) {
        bitmap.getPixels(row, 0, row.size, 0, y, row.size, 1)
        for (colour in row) {
            pixels[place++] = (colour shr 16).toByte()
            pixels[place++] = (colour shr 8).toByte()
            pixels[place++] = colour.toByte()
        }
    }
    return pixels
}
