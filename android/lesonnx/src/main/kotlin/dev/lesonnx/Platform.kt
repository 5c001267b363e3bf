package dev.lesonnx

import java.nio.ByteBuffer
import java.nio.file.Path

/**
 * What the JVM and Android do differently: reading past the page cache, memory outside the heap, native libraries.
 *
 * Implementations are stateless and thread-safe: `dev.lesonnx.jvm.JvmPlatform` and `dev.lesonnx.android.AndroidPlatform`.
 */
interface Platform {
    /** What it is in a manifest's lists of execution providers. */
    val target: Target

    /** Opens a file for direct reads; the caller closes it. Throws IOException. */
    fun openReader(path: Path): DirectReader

    /** Memory outside the heap, zeroed; the caller closes it. Throws [BudgetError] where there is none left. */
    fun allocate(numBytes: Long): NativeMemory

    /** How much more the heap may take from the system than it does: a budget of the whole process counts it. */
    fun heapGrowthBytes(): Long

    /** The expert kernel's library (`liblesonnx.so`) as a path or name that the system's loader finds; null without one. */
    fun kernelLibrary(): String?

    /** The tokenizer of a bundle, closed by the caller; null where the bundle has none. Throws [BundleError]. */
    fun openTokenizer(bundle: Bundle): Tokenizer?
}

/** A file that is read at named offsets. Thread-safe but for [close]: every read names its own offset. */
interface DirectReader : AutoCloseable {
    /** Whether reads go past the page cache. */
    val isDirect: Boolean

    /**
     * Reads from [offsetBytes] into [target], at its position, which moves on; gives the number of bytes, 0 or less at the file's end.
     *
     * Address, length and offset are whole pages of 4096 bytes. Throws IOException.
     */
    fun read(target: ByteBuffer, offsetBytes: Long): Int
}

/** A piece of memory outside the heap, from a page boundary on. Any thread may use it; its owner closes it, once, when nobody does. */
interface NativeMemory : AutoCloseable {
    /** All of it, in native byte order; position 0. Take a duplicate to move a position. */
    val buffer: ByteBuffer
}
