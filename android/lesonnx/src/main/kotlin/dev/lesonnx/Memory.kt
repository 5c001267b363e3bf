package dev.lesonnx

import java.io.File
import java.io.IOException

/** What the system says of this process's memory, in bytes. Linux and Android; thread-safe. */
object Memory {
    /** Resident memory of this process; what the heap takes where the system does not tell. */
    fun currentBytes(): Long = status("VmRSS") ?: Runtime.getRuntime().totalMemory()

    /** The most resident memory that this process had (`VmHWM`); the present where the system does not tell. */
    fun peakBytes(): Long = status("VmHWM") ?: currentBytes()

    private fun status(key: String): Long? = try {
        File("/proc/self/status").useLines { lines ->
            lines.firstOrNull { it.startsWith("$key:") }?.filter(Char::isDigit)?.toLongOrNull()?.times(1024)
        }
    } catch (_: IOException) {
        null
    }
}
