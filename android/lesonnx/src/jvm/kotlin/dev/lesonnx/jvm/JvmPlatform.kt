package dev.lesonnx.jvm

import dev.lesonnx.Bundle
import dev.lesonnx.BudgetError
import dev.lesonnx.DirectReader
import dev.lesonnx.NativeMemory
import dev.lesonnx.Platform
import dev.lesonnx.Target
import dev.lesonnx.TokenTable
import dev.lesonnx.Tokenizer
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.Files
import java.nio.file.Path

/**
 * The JVM on Linux and macOS: direct reads by `ExtendedOpenOption.DIRECT`, direct buffers, tokenizers by DJL's binding of the
 * tokenizers library.
 *
 * [kernelFile] is the expert kernel's library; without it the environment's LESONNX_LIBRARY names it. Direct buffers count
 * against `-XX:MaxDirectMemorySize` (by default as much as the heap), so start the JVM with enough for the expert budget and
 * the attention caches. For a memory budget also set MALLOC_MMAP_THRESHOLD_=131072 in its environment: glibc otherwise keeps
 * what a prefill freed (200 MB on the Qwen3-30B shape), and Java cannot tell it to let go. Immutable, thread-safe.
 */
class JvmPlatform(private val kernelFile: Path? = System.getenv("LESONNX_LIBRARY")?.let(Path::of)) : Platform {
    override val target = Target.DESKTOP

    override fun openReader(path: Path): DirectReader = ChannelReader(path)

    override fun allocate(numBytes: Long): NativeMemory = try {
        DirectMemory(Math.toIntExact(numBytes))
    } catch (_: OutOfMemoryError) {
        throw BudgetError("$numBytes bytes outside the heap are not to be had; start the JVM with a larger -XX:MaxDirectMemorySize")
    } catch (_: ArithmeticException) {
        throw BudgetError("one buffer of $numBytes bytes is asked for; Java's end at 2 GiB")
    }

    override fun heapGrowthBytes(): Long = Runtime.getRuntime().run { maxMemory() - (totalMemory() - freeMemory()) }

    override fun kernelLibrary(): String? = kernelFile?.takeIf { Files.isRegularFile(it) }?.toAbsolutePath()?.toString()

    /** The tokenizers library's, by the bundle's tokenizer.json. */
    override fun openTokenizer(bundle: Bundle): Tokenizer? {
        val path = bundle.manifest.tokenizer?.jsonPath?.let(bundle::file) ?: return null
        return DjlTokenizer(path, TokenTable.read(path))
    }
}

/** A direct buffer from a page boundary on, given back when closed instead of when the collector finds it. */
private class DirectMemory(numBytes: Int) : NativeMemory {
    // A slice begins and ends on a boundary, so whole pages and one more hold what is wanted wherever the buffer begins.
    private val whole = ByteBuffer.allocateDirect(Math.addExact(numBytes, 2 * PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES)
    override val buffer: ByteBuffer = whole.alignedSlice(PAGE_BYTES).limit(numBytes).slice().order(ByteOrder.nativeOrder())

    override fun close() = Cleaner.free(whole)

    private companion object {
        const val PAGE_BYTES = 4096
    }
}

/** `sun.misc.Unsafe.invokeCleaner`, by name since Kotlin's compiler does not see that class. */
private object Cleaner {
    private val unsafeClass = Class.forName("sun.misc.Unsafe")
    private val unsafe = unsafeClass.getDeclaredField("theUnsafe").apply { isAccessible = true }.get(null)
    private val invokeCleaner = unsafeClass.getMethod("invokeCleaner", ByteBuffer::class.java)

    fun free(buffer: ByteBuffer) {
        invokeCleaner.invoke(unsafe, buffer)
    }
}
