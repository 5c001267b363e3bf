package dev.lesonnx

import kotlinx.coroutines.CoroutineDispatcher
import kotlinx.coroutines.asCoroutineDispatcher
import java.util.Collections
import java.util.concurrent.ExecutorService
import java.util.concurrent.Executors

/**
 * A bounded number of threads of one owner, which closes them; on close all work given ends first. Thread-safe.
 *
 * They may run ONNX Runtime on steps of up to [mostRows] rows. It recurses the deeper the more rows there are (2048 rows of
 * hidden size 2048 took 2 to 4 MB of stack), and overflows Java's usual stack of 1 MB without a word.
 */
internal class Workers(name: String, numThreads: Int, mostRows: Int) : AutoCloseable {
    private val threads = Collections.synchronizedSet(HashSet<Thread>())
    val executor: ExecutorService = Executors.newFixedThreadPool(numThreads) { task ->
        Thread(null, task, name, STACK_BYTES + mostRows * STACK_BYTES_PER_ROW).apply { isDaemon = true }.also(threads::add)
    }
    val dispatcher: CoroutineDispatcher = executor.asCoroutineDispatcher()

    /** Whether the calling thread is one of these. */
    val areCalling: Boolean get() = Thread.currentThread() in threads

    override fun close() {
        executor.shutdown()
        threads.toList().forEach(Thread::join)
    }

    private companion object {
        // Reserved addresses, not memory: what is not touched costs nothing.
        const val STACK_BYTES = 8L shl 20
        const val STACK_BYTES_PER_ROW = 8L shl 10
    }
}
