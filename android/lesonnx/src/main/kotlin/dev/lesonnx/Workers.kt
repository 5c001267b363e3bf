package dev.lesonnx

import kotlinx.coroutines.CoroutineDispatcher
import kotlinx.coroutines.asCoroutineDispatcher
import java.util.Collections
import java.util.concurrent.ExecutorService
import java.util.concurrent.Executors

/** A bounded number of threads of one owner, which closes them; on close all work given ends first. Thread-safe. */
internal class Workers(name: String, numThreads: Int) : AutoCloseable {
    private val threads = Collections.synchronizedSet(HashSet<Thread>())
    val executor: ExecutorService = Executors.newFixedThreadPool(numThreads) { task ->
        Thread(null, task, name, STACK_BYTES).apply { isDaemon = true }.also(threads::add)
    }
    val dispatcher: CoroutineDispatcher = executor.asCoroutineDispatcher()

    /** Whether the calling thread is one of these. */
    val areCalling: Boolean get() = Thread.currentThread() in threads

    override fun close() {
        executor.shutdown()
        threads.toList().forEach(Thread::join)
    }

    private companion object {
        // ONNX Runtime runs on them, so they have what its own threads have; Java's would have 1 MB. What is not touched costs nothing.
        const val STACK_BYTES = 8L shl 20
    }
}
