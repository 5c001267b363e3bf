package dev.lesonnx

import dev.lesonnx.jvm.readPicture
import dev.lesonnx.jvm.upright
import dev.lesonnx.vision.Picture
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir
import java.awt.image.BufferedImage
import java.awt.image.BufferedImage.TYPE_3BYTE_BGR
import java.awt.image.BufferedImage.TYPE_4BYTE_ABGR
import java.awt.image.BufferedImage.TYPE_BYTE_BINARY
import java.awt.image.BufferedImage.TYPE_BYTE_GRAY
import java.awt.image.BufferedImage.TYPE_BYTE_INDEXED
import java.awt.image.BufferedImage.TYPE_USHORT_GRAY
import java.io.ByteArrayOutputStream
import java.nio.ByteBuffer
import java.nio.file.Files
import java.nio.file.Path
import java.util.zip.CRC32
import javax.imageio.IIOImage
import javax.imageio.ImageIO
import kotlin.io.path.writeBytes
import kotlin.test.assertContentEquals
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertTrue

/** Files become upright RGB pixels as in Python; what is none is one line. */
internal class PictureFileTest {
    @TempDir
    lateinit var directory: Path

    private fun file(name: String, data: ByteArray): Path = directory.resolve(name).also { it.writeBytes(data) }

    private fun encoded(image: BufferedImage, format: String): ByteArray = ByteArrayOutputStream().also { check(ImageIO.write(image, format, it)) }.toByteArray()

    /** Two rows of three pixels. */
    private fun image(type: Int) = BufferedImage(3, 2, type)

    private fun read(image: BufferedImage, format: String = "png") = readPicture(file("picture.$format", encoded(image, format)))

    private fun ints(picture: Picture) = picture.pixels.map { it.toInt() and 0xFF }

    @Test
    fun `colours are what is stored, whatever the form`() {
        val coloured = image(TYPE_3BYTE_BGR).apply { setRGB(2, 1, 0x0A141E) }
        for (format in listOf("png", "bmp", "tiff")) {
            val found = read(coloured, format)
            assertEquals(2 to 3, found.height to found.width)
            assertEquals(List(15) { 0 } + listOf(10, 20, 30), ints(found), format)
        }
        // Greys are no brighter than they are stored, as Java's own conversion would have them.
        val grey = image(TYPE_BYTE_GRAY).apply { raster.setSample(1, 0, 0, 100) }
        assertEquals(listOf(0, 0, 0, 100, 100, 100), ints(read(grey)).take(6))
        val wideGrey = image(TYPE_USHORT_GRAY).apply { raster.setSample(0, 0, 0, 100 * 257 + 129) }
        assertEquals(listOf(101, 101, 101), ints(read(wideGrey)).take(3))
        // What lies under transparency counts.
        val clear = image(TYPE_4BYTE_ABGR).apply { setRGB(0, 0, 0x00112233) }
        assertEquals(listOf(0x11, 0x22, 0x33), ints(read(clear)).take(3))
        val palette = image(TYPE_BYTE_INDEXED).apply { setRGB(0, 0, 0xFF0000.inv()) }
        val colour = palette.getRGB(0, 0)
        assertEquals(listOf(colour shr 16 and 0xFF, colour shr 8 and 0xFF, colour and 0xFF), ints(read(palette)).take(3))
        val binary = image(TYPE_BYTE_BINARY).apply { setRGB(0, 0, 0xFFFFFF) }
        assertEquals(listOf(255, 255, 255, 0, 0, 0), ints(read(binary)).take(6))
        assertEquals(listOf(7, 7, 7), ints(read(BufferedImage(1, 1, TYPE_BYTE_GRAY).apply { raster.setSample(0, 0, 0, 7) })))
    }

    @Test
    fun `of an animation the first frame counts`() {
        val frames = listOf(0xFF0000, 0x00FF00).map { colour -> image(TYPE_3BYTE_BGR).apply { for (y in 0..1) for (x in 0..2) setRGB(x, y, colour) } }
        val bytes = ByteArrayOutputStream()
        val writer = ImageIO.getImageWritersByFormatName("gif").next()
        ImageIO.createImageOutputStream(bytes).use { output ->
            writer.output = output
            writer.prepareWriteSequence(null)
            for (frame in frames) writer.writeToSequence(IIOImage(frame, null, null), null)
            writer.endWriteSequence()
        }
        assertEquals(listOf(255, 0, 0), ints(readPicture(file("two.gif", bytes.toByteArray()))).take(3))
    }

    @Test
    fun `pictures stand upright as EXIF says`() {
        val stored = Picture(2, 3, ByteArray(18) { (it / 3).toByte() })
        // The rows that each orientation gives, of pixels 0 1 2 above 3 4 5.
        val expected = mapOf(
            1 to listOf(listOf(0, 1, 2), listOf(3, 4, 5)),
            2 to listOf(listOf(2, 1, 0), listOf(5, 4, 3)),
            3 to listOf(listOf(5, 4, 3), listOf(2, 1, 0)),
            4 to listOf(listOf(3, 4, 5), listOf(0, 1, 2)),
            5 to listOf(listOf(0, 3), listOf(1, 4), listOf(2, 5)),
            6 to listOf(listOf(3, 0), listOf(4, 1), listOf(5, 2)),
            7 to listOf(listOf(5, 2), listOf(4, 1), listOf(3, 0)),
            8 to listOf(listOf(2, 5), listOf(1, 4), listOf(0, 3)),
            0 to listOf(listOf(0, 1, 2), listOf(3, 4, 5)),
            77 to listOf(listOf(0, 1, 2), listOf(3, 4, 5)),
        )
        for ((orientation, rows) in expected) {
            val turned = upright(stored, orientation)
            assertEquals(rows.size to rows[0].size, turned.height to turned.width, "$orientation")
            assertEquals(rows.flatten(), turned.pixels.filterIndexed { place, _ -> place % 3 == 0 }.map { it.toInt() }, "$orientation")
        }
        val jpeg = encoded(BufferedImage(32, 16, TYPE_3BYTE_BGR).apply { for (x in 0..15) for (y in 0..15) setRGB(x, y, 0xFFFFFF) }, "jpg")
        for (isLittle in listOf(true, false)) {
            val turned = readPicture(file("turned.jpg", withOrientation(jpeg, 6, isLittle)))
            assertEquals(32 to 16, turned.height to turned.width)
            assertTrue(ints(turned).take(48).all { it > 240 } && ints(turned).takeLast(48).all { it < 15 })
        }
        assertEquals(16, readPicture(file("broken.jpg", withOrientation(jpeg, 6, true, entries = 9999))).height.coerceAtMost(16))
        assertEquals(16, readPicture(file("plain.jpg", jpeg)).height)
    }

    /** A JPEG with EXIF behind its first marker. */
    private fun withOrientation(jpeg: ByteArray, orientation: Int, isLittle: Boolean, entries: Int = 1): ByteArray {
        val order = if (isLittle) java.nio.ByteOrder.LITTLE_ENDIAN else java.nio.ByteOrder.BIG_ENDIAN
        val tiff = ByteBuffer.allocate(26).order(order).put((if (isLittle) "II" else "MM").toByteArray()).putShort(42).putInt(8)
            .putShort(entries.toShort()).putShort(0x0112).putShort(3).putInt(1).putShort(orientation.toShort()).putShort(0).array()
        val content = "Exif\u0000\u0000".toByteArray(Charsets.ISO_8859_1) + tiff
        val segment = byteArrayOf(0xFF.toByte(), 0xE1.toByte(), 0, (content.size + 2).toByte()) + content
        return jpeg.copyOf(2) + segment + jpeg.copyOfRange(2, jpeg.size)
    }

    @Test
    fun `what is no picture is one line`() {
        fun said(path: Path): String = assertFailsWith<InputError> { readPicture(path) }.message!!.also { message ->
            assertTrue(message.startsWith("$path: ") && '\n' !in message && message.length < 400, message)
        }
        val photo = encoded(BufferedImage(400, 300, TYPE_3BYTE_BGR).apply { for (x in 0 until 400) for (y in 0 until 300) setRGB(x, y, x * y) }, "jpg")
        val drawing = encoded(BufferedImage(400, 300, TYPE_3BYTE_BGR).apply { for (x in 0 until 400) for (y in 0 until 300) setRGB(x, y, x * y) }, "png")
        assertTrue("no such file" in said(directory.resolve("gone.png")))
        assertTrue("found a directory" in said(directory))
        assertTrue("not a picture, expected one of" in said(file("text.png", "a text".toByteArray())))
        assertTrue("not a picture, expected one of" in said(file("empty.png", ByteArray(0))))
        assertTrue("a broken picture" in said(file("half.jpg", photo.copyOf(photo.size / 2))))
        assertTrue("a broken picture" in said(file("half.png", drawing.copyOf(drawing.size / 2))))
        assertTrue("a broken picture" in said(file("head.png", drawing.copyOf(20))))
        val large = drawing.copyOf().also { data ->
            ByteBuffer.wrap(data).putInt(16, 100_000).putInt(20, 100_000).putInt(29, CRC32().apply { update(data, 12, 17) }.value.toInt())
        }
        assertTrue("100000 x 100000 pixels: too large, expected at most 134 megapixels" in said(file("large.png", large)))
        val outside = IntArray(drawing.size / 211) { it * 211 }
        for (place in outside.drop(1)) {
            // Whatever is broken, it is a picture or one line.
            val changed = drawing.copyOf().also { it[place] = (it[place] + 77).toByte() }
            try {
                readPicture(file("changed.png", changed))
            } catch (error: InputError) {
                assertTrue('\n' !in error.message!!)
            }
        }
    }

    @Test
    fun `the checkpoint's pictures are read`() {
        val folder = TestData.data.resolve("checkpoints/minicpmv4_7_moe/images")
        val sizes = Files.newDirectoryStream(folder).use { files -> files.associate { path -> path.fileName.toString() to readPicture(path).let { it.height to it.width } } }
        assertEquals(setOf("small.png", "tall.png", "wide.png"), sizes.keys)
        assertContentEquals(readPicture(folder.resolve("wide.png")).pixels, readPicture(folder.resolve("wide.png")).pixels)
    }
}
