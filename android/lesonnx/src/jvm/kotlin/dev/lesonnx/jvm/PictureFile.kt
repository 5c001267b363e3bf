package dev.lesonnx.jvm

import dev.lesonnx.InputError
import dev.lesonnx.vision.Picture
import java.awt.image.BufferedImage
import java.awt.image.IndexColorModel
import java.io.IOException
import java.nio.file.Files
import java.nio.file.Path
import javax.imageio.ImageIO
import javax.imageio.ImageReader
import javax.imageio.stream.ImageInputStream

/** As in Python: cameras stay below it. */
private const val MAX_PIXELS = 1L shl 27

/**
 * The picture in a file that the JDK can decode (PNG, JPEG, GIF, BMP, TIFF): upright as a JPEG's EXIF says, 8-bit RGB, alpha left out, the
 * first frame of several. [InputError] in one line for what is no picture, is broken, or is too large.
 */
fun readPicture(path: Path): Picture {
    when {
        !Files.exists(path) -> throw InputError("$path: no such file")
        Files.isDirectory(path) -> throw InputError("$path: expected a picture, found a directory")
        !Files.isRegularFile(path) -> throw InputError("$path: expected a picture, found what is no regular file")
    }
    // No file of its own for what is read: it is read from the start to the end.
    ImageIO.setUseCache(false)
    return try {
        val data = Files.readAllBytes(path)
        ImageIO.createImageInputStream(data.inputStream()).use { input -> upright(decode(input, path), orientationOf(data)) }
    } catch (error: InputError) {
        throw error
    } catch (_: OutOfMemoryError) {
        throw tooLarge(path)
    } catch (error: IOException) {
        // Decoders hand on a full heap as their own error.
        throw if (causes(error).any { it is OutOfMemoryError }) tooLarge(path) else InputError("$path: a broken picture, or it cannot be read: ${reason(error)}")
    } catch (error: RuntimeException) { // decoders throw whatever a broken file leads them to
        throw InputError("$path: a broken picture: ${reason(error)}")
    }
}

private fun tooLarge(path: Path) = InputError("$path: too large for Java's heap; start the JVM with a larger -Xmx")

private fun causes(error: Throwable): Sequence<Throwable> = generateSequence(error) { it.cause }

private fun reason(error: Throwable): String {
    val last = causes(error).last()
    return (last.message ?: last.javaClass.simpleName).trim().split(Regex("\\s+")).joinToString(" ").take(200)
}

private fun decode(input: ImageInputStream, path: Path): Picture {
    val readers = ImageIO.getImageReaders(input)
    if (!readers.hasNext()) throw InputError("$path: not a picture, expected one of PNG, JPEG, GIF, BMP, TIFF")
    val reader = readers.next()
    try {
        reader.setInput(input, false, true)
        val width = reader.getWidth(0)
        val height = reader.getHeight(0)
        if (width.toLong() * height > MAX_PIXELS) {
            throw InputError("$path: $width x $height pixels: too large, expected at most ${MAX_PIXELS / 1_000_000} megapixels")
        }
        var warning: String? = null
        reader.addIIOReadWarningListener { _, text -> if (CUT_OFF in text) warning = text }
        val image = read(reader, path)
        warning?.let { throw InputError("$path: a broken picture: $it") }
        return Picture(image.height, image.width, rgb(image))
    } finally {
        reader.dispose()
    }
}

private fun read(reader: ImageReader, path: Path): BufferedImage {
    val image = reader.read(0)
    val bits = image.sampleModel.getSampleSize(0)
    if (bits > 2 * Byte.SIZE_BITS) throw InputError("$path: pixels have $bits bits a colour, expected 8 or 16")
    return image
}

/** What the JPEG reader says where pixels are missing, which it then makes up. */
private const val CUT_OFF = "premature end"

/** The stored colours as they are: no profile, no alpha. */
private fun rgb(image: BufferedImage): ByteArray {
    val pixels = ByteArray(Math.toIntExact(Picture.CHANNELS.toLong() * image.width * image.height))
    val raster = image.raster
    val palette = image.colorModel as? IndexColorModel
    val bands = raster.numBands
    val shift = image.sampleModel.getSampleSize(0) - Byte.SIZE_BITS
    var line: IntArray? = null
    var place = 0
    for (y in 0 until image.height) {
        val samples = raster.getPixels(raster.minX, raster.minY + y, image.width, 1, line).also { line = it }
        for (x in 0 until image.width) {
            val first = samples[x * bands]
            for (channel in 0 until Picture.CHANNELS) {
                pixels[place++] = when {
                    palette != null -> palette.getRGB(first) shr (16 - 8 * channel)
                    bands < Picture.CHANNELS -> if (shift > 0) narrowed(first) else first
                    else -> samples[x * bands + channel] shr maxOf(shift, 0)
                }.toByte()
            }
        }
    }
    return pixels
}

/** A number of 16 bits as one of 8: divided by 257, rounded. */
private fun narrowed(value: Int): Int = (value - (value shr 8) + 128) shr 8

/** The picture turned as EXIF's [orientation] says how it is stored; what is none of its values changes nothing. */
internal fun upright(picture: Picture, orientation: Int): Picture {
    if (orientation !in 2..8) return picture
    val isTransposed = orientation >= 5
    val isFlipped = orientation in setOf(3, 4, 7, 8)
    val isMirrored = orientation in setOf(2, 3, 6, 7)
    val height = if (isTransposed) picture.width else picture.height
    val width = if (isTransposed) picture.height else picture.width
    val pixels = ByteArray(picture.pixels.size)
    for (y in 0 until height) {
        for (x in 0 until width) {
            val row = if (isFlipped) height - 1 - y else y
            val column = if (isMirrored) width - 1 - x else x
            val from = if (isTransposed) column * picture.width + row else row * picture.width + column
            picture.pixels.copyInto(pixels, Picture.CHANNELS * (y * width + x), Picture.CHANNELS * from, Picture.CHANNELS * (from + 1))
        }
    }
    return Picture(height, width, pixels)
}
