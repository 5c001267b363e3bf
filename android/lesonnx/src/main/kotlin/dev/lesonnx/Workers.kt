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
        Thread(task, name).apply { isDaemon = true }.also(threads::add)
    }
    val dispatcher: CoroutineDispatcher = executor.asCoroutineDispatcher()

    /** Whether the calling thread is one of these. */
    val areCalling: Boolean get() = Thread.currentThread() in threads

    override fun close() {
        executor.shutdown()
        threads.toList().forEach(Thread::join)
    }
}
