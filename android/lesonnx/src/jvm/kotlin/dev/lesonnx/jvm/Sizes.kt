package dev.lesonnx.jvm

import dev.lesonnx.InputError
import java.util.Locale

private val SIZE = Regex("\\s*(\\d+(?:\\.\\d+)?)\\s*([A-Za-z]*)\\s*")
private val UNITS: Map<String, Double> = buildMap {
    put("", 1.0)
    put("B", 1.0)
    var decimal = 1.0
    var binary = 1.0
    for (letter in "KMGT") {
        decimal *= 1000
        binary *= 1024
        put("$letter", decimal)
        put("${letter}B", decimal)
        put("${letter}IB", binary)
    }
}

/** A size such as `3GB` (10^9), `2GiB` (2^30), `1.5M` or `4096`; InputError for anything else. */
internal fun parseBytes(text: String): Long {
    val (number, letters) = SIZE.matchEntire(text)?.destructured ?: throw noSize(text)
    val unit = UNITS[letters.uppercase(Locale.ROOT)] ?: throw noSize(text)
    val numBytes = number.toDouble() * unit
    if (numBytes >= 1L shl 62) throw InputError("'${text.take(40)}' is more than any memory holds")
    return numBytes.toLong()
}

private fun noSize(text: String) = InputError("'$text' is not a size; write bytes or a unit, such as 3GB, 500MiB or 4096")

/** A size for people, decimal units: `1.67 MB`. */
internal fun formatBytes(numBytes: Long): String {
    if (numBytes < 1000) return "$numBytes B"
    var size = numBytes / 1000.0
    val units = listOf("kB", "MB", "GB", "TB")
    var place = 0
    while (size >= 999.5 && place < units.lastIndex) {
        size /= 1000
        place++
    }
    val digits = if (size >= 99.95) 0 else if (size >= 9.995) 1 else 2
    return "%.${digits}f %s".format(Locale.ROOT, size, units[place])
}
