package dev.lesonnx.jvm

import java.nio.BufferUnderflowException
import java.nio.ByteBuffer
import java.nio.ByteOrder

private const val SCAN = 0xDA
private const val APP1 = 0xE1
private const val ORIENTATION_TAG = 0x0112
private const val SHORT_TYPE = 3
private const val ENTRY_BYTES = 12
private val JPEG = byteArrayOf(0xFF.toByte(), 0xD8.toByte(), 0xFF.toByte())
private val EXIF = "Exif\u0000\u0000".toByteArray(Charsets.ISO_8859_1)

/** EXIF's orientation of a JPEG, 1 to 8 unless it is broken; 1 where there is none, and for what is no JPEG. */
internal fun orientationOf(data: ByteArray): Int {
    if (!data.beginsWith(JPEG, 0)) return 1
    var place = 2
    while (place + 4 <= data.size) {
        val marker = data[place + 1].toInt() and 0xFF
        // What is between segments, what fills up before one, and markers without a length.
        if (data[place] != 0xFF.toByte() || marker == 0xFF) {
            place++
            continue
        }
        if (marker == SCAN) break
        if (marker <= 0x01 || marker in 0xD0..0xD8) {
            place += 2
            continue
        }
        val length = (data[place + 2].toInt() and 0xFF shl 8) or (data[place + 3].toInt() and 0xFF)
        val begin = place + 4
        val end = minOf(place + 2 + length, data.size)
        if (marker == APP1 && data.beginsWith(EXIF, begin) && begin + EXIF.size <= end) {
            return orientation(ByteBuffer.wrap(data, begin + EXIF.size, end - begin - EXIF.size).slice())
        }
        place += 2 + maxOf(length, 2)
    }
    return 1
}

private fun ByteArray.beginsWith(bytes: ByteArray, place: Int): Boolean =
    place + bytes.size <= size && bytes.indices.all { this[place + it] == bytes[it] }

/** That of the first directory of a TIFF header. */
private fun orientation(tiff: ByteBuffer): Int = try {
    tiff.order(if (tiff.get(0) == 'I'.code.toByte()) ByteOrder.LITTLE_ENDIAN else ByteOrder.BIG_ENDIAN)
    val directory = tiff.getInt(4)
    val count = tiff.getShort(directory).toInt() and 0xFFFF
    (0 until count).map { directory + 2 + ENTRY_BYTES * it }
        .firstOrNull { tiff.getShort(it).toInt() == ORIENTATION_TAG && tiff.getShort(it + 2).toInt() == SHORT_TYPE }
        ?.let { tiff.getShort(it + 8).toInt() } ?: 1
} catch (_: IndexOutOfBoundsException) {
    1
} catch (_: BufferUnderflowException) {
    1
}
