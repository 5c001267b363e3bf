package dev.lesonnx.vision

import dev.lesonnx.InputError
import java.security.MessageDigest
import java.util.Locale

/**
 * A decoded picture: [height] x [width] pixels of 8-bit red, green and blue, row by row, upright. Immutable as long as nobody writes into
 * [pixels], which it does not copy. Safe to share. [InputError] for pixels that are not so many.
 */
class Picture(val height: Int, val width: Int, val pixels: ByteArray) {
    init {
        if (height < 1 || width < 1 || pixels.size.toLong() != CHANNELS * height.toLong() * width) {
            throw InputError("a picture of $height x $width pixels has ${pixels.size} bytes, expected $CHANNELS a pixel, and a pixel at least")
        }
    }

    /** SHA-256 of size and pixels: pictures with the same key are the same. */
    val key: String by lazy {
        val digest = MessageDigest.getInstance("SHA-256")
        digest.update("$height $width ".toByteArray())
        digest.digest(pixels).joinToString("") { "%02x".format(Locale.ROOT, it) }
    }

    companion object {
        /** Red, green, blue. */
        const val CHANNELS = 3
    }
}
