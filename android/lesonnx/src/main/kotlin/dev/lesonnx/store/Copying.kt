package dev.lesonnx.store

import dev.lesonnx.LesonnxError
import dev.lesonnx.oneLine
import kotlinx.coroutines.ensureActive
import java.io.IOException
import java.io.InputStream
import java.io.OutputStream
import java.nio.file.Files
import java.nio.file.Path
import java.security.MessageDigest
import java.util.Locale
import kotlin.coroutines.coroutineContext

private const val BLOCK_BYTES = 1 shl 16

/** Storage that does not take what is written: a full disk, above all. */
internal class WriteError(cause: IOException) : LesonnxError("could not be written: ${oneLine(cause)}", cause)

/** Copies at most [limitBytes], telling [digest] and [progress] of every block; gives the bytes copied. Cancellable between blocks. */
internal suspend fun copy(
    input: InputStream,
    output: OutputStream,
    digest: MessageDigest,
    limitBytes: Long = Long.MAX_VALUE,
    progress: (Long) -> Unit,
): Long {
    val block = ByteArray(BLOCK_BYTES)
    var total = 0L
    while (total < limitBytes) {
        coroutineContext.ensureActive()
        val count = input.read(block, 0, minOf(block.size.toLong(), limitBytes - total).toInt())
        if (count < 0) break
        try {
            output.write(block, 0, count)
        } catch (error: IOException) {
            throw WriteError(error)
        }
        digest.update(block, 0, count)
        total += count
        progress(count.toLong())
    }
    return total
}

internal fun sha256(): MessageDigest = MessageDigest.getInstance("SHA-256")

/** Tells a digest what a file holds already. */
internal suspend fun MessageDigest.add(file: Path) {
    Files.newInputStream(file).use { input ->
        val block = ByteArray(BLOCK_BYTES)
        while (true) {
            coroutineContext.ensureActive()
            val count = input.read(block)
            if (count < 0) break
            update(block, 0, count)
        }
    }
}

internal fun MessageDigest.hex(): String = digest().joinToString("") { "%02x".format(Locale.ROOT, it) }

/** A size for people, decimal units, three digits: `1.67 MB`. */
fun formatBytes(bytes: Long): String {
    if (bytes < 1000) return "$bytes B"
    var value = bytes.toDouble()
    for (unit in listOf("kB", "MB", "GB")) {
        value /= 1000
        if (value < 999.5) return "${threeDigits(value)} $unit"
    }
    return "${threeDigits(value / 1000)} TB"
}

private fun threeDigits(value: Double): String {
    val decimals = if (value >= 99.95) 0 else if (value >= 9.995) 1 else 2
    return "%.${decimals}f".format(Locale.ROOT, value)
}
