package dev.lesonnx.android

import android.os.SharedMemory
import android.system.ErrnoException
import android.system.Os
import android.system.OsConstants
import dev.lesonnx.BudgetError
import dev.lesonnx.BpeTokenizer
import dev.lesonnx.Bundle
import dev.lesonnx.DirectReader
import dev.lesonnx.NativeMemory
import dev.lesonnx.Platform
import dev.lesonnx.Target
import dev.lesonnx.Tokenizer
import java.io.File
import java.io.FileDescriptor
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.Path

/**
 * Android 10 and later: reads by `android.system.Os`, memory outside the heap by [SharedMemory], tokenizers in Kotlin.
 *
 * [nativeLibraryDirectory] is `context.applicationInfo.nativeLibraryDir`; null leaves finding the kernel to the linker, which
 * knows the app's libraries by name whether or not they are unpacked. Immutable, thread-safe.
 */
class AndroidPlatform(private val nativeLibraryDirectory: String? = null) : Platform {
    override val target = Target.ANDROID

    override fun openReader(path: Path): DirectReader = OsReader(path)

    override fun allocate(numBytes: Long): NativeMemory {
        if (numBytes > Int.MAX_VALUE) throw BudgetError("one buffer of $numBytes bytes is asked for; Java's end at 2 GiB")
        try {
            return SharedPiece(numBytes.toInt())
        } catch (error: ErrnoException) {
            throw BudgetError("$numBytes bytes of memory are not to be had: ${error.message}")
        }
    }

    /** What buffers outside the heap leave to it is little: objects of a step, texts, the app's screens. */
    override fun heapGrowthBytes(): Long = HEAP_GROWTH_BYTES

    override fun kernelLibrary(): String? {
        val unpacked = nativeLibraryDirectory?.let { File(it, KERNEL_LIBRARY) }
        if (unpacked != null && unpacked.isFile) return unpacked.path
        return try {
            System.loadLibrary("lesonnx")
            KERNEL_LIBRARY
        } catch (_: UnsatisfiedLinkError) {
            null
        }
    }

    /** Kotlin's own; an app that ships onnxruntime-extensions 0.15 can give [dev.lesonnx.OnnxTokenizer] instead. */
    override fun openTokenizer(bundle: Bundle): Tokenizer? = bundle.manifest.tokenizer?.jsonPath?.let { BpeTokenizer.read(bundle.file(it)) }

    private companion object {
        const val KERNEL_LIBRARY = "liblesonnx.so"
        const val HEAP_GROWTH_BYTES = 64L shl 20
    }
}

/** Android's direct buffers lie in the app's heap, whose limit is far below a cache of experts; a mapping does not. */
private class SharedPiece(numBytes: Int) : NativeMemory {
    // The descriptor is not needed once the memory is mapped.
    override val buffer: ByteBuffer = SharedMemory.create("lesonnx", numBytes).use { it.mapReadWrite() }.order(ByteOrder.nativeOrder())

    override fun close() = SharedMemory.unmap(buffer)
}

/** Reads past the page cache by O_DIRECT where the file system allows it, else through it. */
private class OsReader(private val path: Path) : DirectReader {
    // Opened in any case: whether direct reads work shows only when one is tried, perhaps by several threads.
    private val buffered = open(OsConstants.O_RDONLY)
    private val direct = try {
        open(OsConstants.O_RDONLY or O_DIRECT)
    } catch (_: IOException) { // a file system that refuses the flag
        null
    }

    @Volatile
    override var isDirect = direct != null
        private set

    private fun open(flags: Int): FileDescriptor = try {
        Os.open(path.toString(), flags or OsConstants.O_CLOEXEC, 0)
    } catch (error: ErrnoException) {
        throw IOException("$path: ${error.message}", error)
    }

    override fun read(target: ByteBuffer, offsetBytes: Long): Int {
        if (isDirect && direct != null) {
            try {
                return Os.pread(direct, target, offsetBytes)
            } catch (error: ErrnoException) {
                // Some file systems take the flag and refuse the read.
                if (error.errno != OsConstants.EINVAL) throw IOException("$path: ${error.message}", error)
                isDirect = false
            }
        }
        return try {
            Os.pread(buffered, target, offsetBytes)
        } catch (error: ErrnoException) {
            throw IOException("$path: ${error.message}", error)
        }
    }

    override fun close() {
        direct?.let(Os::close)
        Os.close(buffered)
    }

    private companion object {
        /** Not among OsConstants: 0o200000 on ARM, 0o40000 on x86. */
        val O_DIRECT = if (System.getProperty("os.arch").orEmpty().let { it.startsWith("aarch64") || it.startsWith("arm") }) 0x10000 else 0x4000
    }
}
