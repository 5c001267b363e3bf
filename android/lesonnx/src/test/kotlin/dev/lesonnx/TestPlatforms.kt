package dev.lesonnx

import java.io.IOException
import java.nio.ByteBuffer
import java.nio.file.Path
import java.util.concurrent.atomic.AtomicInteger
import java.util.concurrent.atomic.AtomicLong

/** A platform that counts what is open and allocated. Thread-safe. */
internal class CountingPlatform(private val inner: Platform = platform) : Platform by inner {
    val liveBytes = AtomicLong()
    val openReaders = AtomicInteger()

    override fun allocate(numBytes: Long): NativeMemory {
        val memory = inner.allocate(numBytes)
        liveBytes.addAndGet(numBytes)
        return object : NativeMemory by memory {
            override fun close() {
                liveBytes.addAndGet(-numBytes)
                memory.close()
            }
        }
    }

    override fun openReader(path: Path): DirectReader {
        val reader = inner.openReader(path)
        openReaders.incrementAndGet()
        return object : DirectReader by reader {
            override fun close() {
                openReaders.decrementAndGet()
                reader.close()
            }
        }
    }
}

/** A platform whose reads fail where [fails] says so, by the number of the read. Thread-safe. */
internal class FailingPlatform(private val inner: Platform = platform, private val fails: (Int) -> Boolean) : Platform by inner {
    private val reads = AtomicInteger()

    override fun openReader(path: Path): DirectReader {
        val reader = inner.openReader(path)
        return object : DirectReader by reader {
            override fun read(target: ByteBuffer, offsetBytes: Long): Int {
                if (fails(reads.getAndIncrement())) throw IOException("Input/output error")
                return reader.read(target, offsetBytes)
            }
        }
    }
}
