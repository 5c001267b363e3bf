package dev.lesonnx.jvm

import com.sun.nio.file.ExtendedOpenOption
import dev.lesonnx.DirectReader
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.channels.FileChannel
import java.nio.file.Path
import java.nio.file.StandardOpenOption.READ

/**
 * Reads past the page cache where the file system allows it, else through it. Do not interrupt a thread that reads: that closes
 * the channel.
 */
internal class ChannelReader(path: Path) : DirectReader {
    // Opened in any case: whether direct reads work shows only when one is tried, perhaps by several threads.
    private val buffered = FileChannel.open(path, READ)
    private val direct = try {
        FileChannel.open(path, READ, ExtendedOpenOption.DIRECT)
    } catch (_: UnsupportedOperationException) {
        null
    } catch (_: IOException) { // a file system that refuses the option
        null
    }

    @Volatile
    override var isDirect = direct != null
        private set

    override fun read(target: ByteBuffer, offsetBytes: Long): Int {
        if (isDirect && direct != null) {
            try {
                return direct.read(target, offsetBytes)
            } catch (error: IOException) {
                // Some file systems take the option and refuse the read.
                if (error.message != INVALID_ARGUMENT) throw error
                isDirect = false
            }
        }
        return buffered.read(target, offsetBytes)
    }

    override fun close() {
        direct?.close()
        buffered.close()
    }

    private companion object {
        /** What the JVM makes of EINVAL. */
        const val INVALID_ARGUMENT = "Invalid argument"
    }
}
