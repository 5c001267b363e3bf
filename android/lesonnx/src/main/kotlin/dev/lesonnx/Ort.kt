package dev.lesonnx

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtLoggingLevel
import ai.onnxruntime.OrtSession
import java.nio.file.Path
import java.util.concurrent.ExecutionException
import java.util.concurrent.FutureTask

/** ONNX Runtime as this library uses it: one pool of threads, session options, version check. It knows no bundle. Thread-safe. */
internal object Ort {
    private var poolThreads = 0

    /**
     * The process's environment, made with one pool of [numThreads] threads that sleep between runs; the first call decides.
     *
     * Where the app itself has made an environment before, that one is used, and sessions have threads of their own.
     */
    @Synchronized
    fun environment(numThreads: Int): OrtEnvironment {
        if (poolThreads == 0) {
            // ONNX Runtime 1.29 matches a pattern against the command line, recursing with every character of it: a prompt of 4 kB
            // among the arguments overflows the usual stack, which ends the process without a word.
            val made = FutureTask { makePool(numThreads) }
            Thread(null, made, "lesonnx environment", STACK_BYTES).start()
            poolThreads = try {
                made.get()
            } catch (error: ExecutionException) {
                throw error.cause ?: error
            }
        }
        return OrtEnvironment.getEnvironment()
    }

    private fun makePool(numThreads: Int): Int = OrtEnvironment.ThreadingOptions().use { options ->
        options.setGlobalIntraOpNumThreads(numThreads)
        options.setGlobalInterOpNumThreads(1)
        // Spinning threads would take the processor from the reading ones, and from whatever else runs.
        options.setGlobalSpinControl(false)
        try {
            OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR, "lesonnx", options)
            numThreads
        } catch (_: IllegalStateException) {
            NO_POOL
        }
    }

    /** Throws [BundleError] where the ONNX Runtime at hand is older than a bundle needs. */
    fun checkVersion(atLeast: String, found: String) {
        val (needed, have) = version(atLeast) to version(found)
        val place = needed.indices.firstOrNull { needed[it] != have[it] } ?: return
        if (have[place] < needed[place]) throw BundleError("the bundle needs ONNX Runtime $atLeast or later, found $found")
    }

    private fun version(text: String): IntArray {
        val pieces = text.split('.')
        return IntArray(3) { place -> pieces.getOrNull(place)?.filter(Char::isDigit)?.toIntOrNull() ?: 0 }
    }

    /**
     * Options that every session shares; the caller closes them. [numThreads] threads from the common pool where it has as many,
     * else of the session's own; one thread is the caller's.
     *
     * No arena and no memory pattern: they would keep each part's largest prefill activations for good. [environment] comes first.
     */
    @Synchronized
    fun sessionOptions(optimise: Boolean, numThreads: Int): OrtSession.SessionOptions {
        val options = OrtSession.SessionOptions()
        if (numThreads == poolThreads && numThreads > 1) {
            options.disablePerSessionThreads()
        } else {
            options.setIntraOpNumThreads(numThreads)
            options.addConfigEntry("session.intra_op.allow_spinning", "0")
        }
        options.setInterOpNumThreads(1)
        options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR)
        options.setCPUArenaAllocator(false)
        options.setMemoryPatternOptimization(false)
        options.setOptimizationLevel(
            if (optimise) OrtSession.SessionOptions.OptLevel.ALL_OPT else OrtSession.SessionOptions.OptLevel.NO_OPT,
        )
        return options
    }

    /** A session of a model file, which the caller closes; [BundleError] in one line where ONNX Runtime does not take it. */
    fun openSession(path: Path, options: OrtSession.SessionOptions): OrtSession = try {
        OrtEnvironment.getEnvironment().createSession(path.toString(), options)
    } catch (error: OrtException) {
        throw BundleError("$path: ONNX Runtime does not take it: ${firstLine(error)}")
    }

    /** An exception's message on one line. */
    fun firstLine(error: Throwable): String {
        val text = error.message.orEmpty().split(Regex("\\s+")).joinToString(" ")
        return if (text.length <= 400) text else "${text.take(200)} … ${text.takeLast(200)}"
    }

    private const val NO_POOL = -1

    // Enough for the longest single argument that Linux takes, 128 kB; what is not touched costs nothing.
    private const val STACK_BYTES = 128L shl 20
}

/**
 * A session bound to tensors that stay where they are: a run reads and writes them in place. Owns neither. Not thread-safe.
 */
internal class Binding(
    private val session: OrtSession,
    private val inputs: Map<String, OnnxTensor>,
    private val outputs: Map<String, OnnxTensor>,
) {
    /** Throws [LesonnxError] in one line where ONNX Runtime fails. */
    fun run() {
        try {
            session.run(inputs, outputs).close()
        } catch (error: OrtException) {
            throw LesonnxError("ONNX Runtime failed in a step: ${Ort.firstLine(error)}")
        }
    }
}
