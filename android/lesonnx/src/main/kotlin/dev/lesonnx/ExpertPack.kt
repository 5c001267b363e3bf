package dev.lesonnx

import java.nio.ByteBuffer
import java.nio.file.Path

/** The experts of one layer in their file, read straight to where they are used. Thread-safe; its owner closes it when no read is under way. */
internal class ExpertPack(private val path: Path, platform: Platform) : AutoCloseable {
    private val reader = platform.openReader(path)

    /** Whether reads go past the page cache. */
    val isDirect: Boolean get() = reader.isDirect

    /**
     * Fills [target], whole pages on a page boundary, from a page-aligned offset of the pack.
     *
     * Throws [LoadError] where the file ends early, IOException where the system cannot read it.
     */
    fun readInto(target: ByteBuffer, offsetBytes: Long) {
        val begin = target.position()
        while (target.hasRemaining()) {
            val done = target.position() - begin
            val count = reader.read(target, offsetBytes + done)
            // After a part of a page a direct read cannot go on: only the end of the file leaves one.
            if (count <= 0 || (isDirect && target.hasRemaining() && count % PAGE_BYTES != 0)) {
                throw LoadError("$path: ends at byte ${offsetBytes + done + maxOf(count, 0)}, expected more")
            }
        }
    }

    override fun close(): Unit = reader.close()
}
