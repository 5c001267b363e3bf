package dev.lesonnx

import ai.onnxruntime.OnnxJavaType.FLOAT
import ai.onnxruntime.OrtSession
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.channels.FileChannel
import java.nio.file.StandardOpenOption
import java.util.concurrent.atomic.AtomicReferenceArray

/**
 * The `session` engine: plain ONNX Runtime, a session from each expert's own .onnx. Nothing to build.
 *
 * A load reads the expert's bytes, then ONNX Runtime packs them; the session is the cache entry. [load] is thread-safe, the
 * rest belongs to one thread.
 */
internal class SessionEngine(private val bundle: Bundle, private val platform: Platform, override val notes: List<String>) : ExpertEngine {
    override val name = "session"

    // Measured: packed copies, their allocator's rounding, and what a session needs beside its weights.
    override val memoryPerByte = 1.8

    // Experts are a handful of nodes: optimising a graph costs more than it brings. Hundreds may be in memory, so none has threads.
    private val options = Ort.sessionOptions(optimise = false, numThreads = 1)
    private val experts = bundle.experts
    private val sessions = AtomicReferenceArray<OrtSession?>(experts.size)
    private var scratch: Scratch? = null

    /** Room for the rows of one expert, of a step of several rows. */
    private class Scratch(val work: LayerWork, platform: Platform) : AutoCloseable {
        private val arena = TensorArena(platform)
        private val inputAt = arena.plan(FLOAT, *work.hidden.shape)
        private val outputAt = arena.plan(FLOAT, *work.hidden.shape)

        init {
            arena.allocate()
        }

        val input = arena[inputAt]
        val output = arena[outputAt]

        override fun close() = arena.close()
    }

    /** Sessions lie where ONNX Runtime puts them. */
    override fun resize(slabBytes: LongArray) = Unit

    override fun load(expert: Expert, slab: Int, offsetBytes: Long): Long {
        // A plain read first: faulting a mapping in page by page is far slower than one sequential read.
        FileChannel.open(bundle.packFile(expert.layerIdx), StandardOpenOption.READ).use { pack -> readThrough(pack, expert) }
        sessions.set(expert.number, Ort.openSession(bundle.modelFile(expert), options))
        return expert.costBytes
    }

    private fun readThrough(pack: FileChannel, expert: Expert) {
        val block = blocks.get()
        var offset = expert.offsetBytes
        val end = offset + expert.costBytes
        while (offset < end) {
            block.clear().limit(minOf(READ_BYTES.toLong(), end - offset).toInt())
            val count = pack.read(block, offset)
            if (count <= 0) throw LoadError("$expert: the pack ends at byte $offset, expected $end")
            offset += count
        }
    }

    override fun compute(experts: IntArray, work: LayerWork) {
        for (number in experts) {
            val session = checkNotNull(sessions.get(number)) { "expert $number is not loaded" }
            when {
                this.experts[number].expertIdx == null -> run(session, work.hidden, work.sharedOut)
                work.numRows == 1 -> rows(work.expertOut, work.place(number, 0), 1).use { run(session, work.hidden, it) }
                else -> computeRows(session, number, work)
            }
        }
    }

    private fun computeRows(session: OrtSession, number: Int, work: LayerWork) {
        val room = scratch?.takeIf { it.work === work } ?: Scratch(work, platform).also {
            scratch?.close()
            scratch = it
        }
        val count = work.numRowsOf(number)
        for (index in 0 until count) copyRow(work.hidden, work.place(number, index) / work.slots, room.input, index)
        rows(room.input, 0, count).use { input ->
            rows(room.output, 0, count).use { output -> run(session, input, output) }
        }
        for (index in 0 until count) copyRow(room.output, index, work.expertOut, work.place(number, index))
    }

    private fun run(session: OrtSession, input: Tensor, output: Tensor) {
        Binding(session, mapOf("x" to input.onnx), mapOf("y" to output.onnx)).run()
    }

    override fun evict(expert: Expert) {
        sessions.getAndSet(expert.number, null)?.close()
    }

    override fun forget(work: LayerWork) {
        if (scratch?.work === work) {
            scratch?.close()
            scratch = null
        }
    }

    override fun close() {
        experts.forEach(::evict)
        scratch?.close()
        scratch = null
        options.close()
    }

    private companion object {
        const val READ_BYTES = 1 shl 20
        val blocks: ThreadLocal<ByteBuffer> = ThreadLocal.withInitial { ByteBuffer.allocateDirect(READ_BYTES) }

        /** [count] rows of the last dimension from row [first] on, as a tensor [count,H] over the same memory. */
        fun rows(tensor: Tensor, first: Int, count: Int): Tensor {
            val size = tensor.shape.last()
            val begin = first * size * Float.SIZE_BYTES
            val end = begin + count * size * Float.SIZE_BYTES
            val bytes = tensor.bytes.duplicate().limit(end.toInt()).position(begin.toInt()).slice().order(ByteOrder.nativeOrder())
            return Tensor(FLOAT, longArrayOf(count.toLong(), size), bytes)
        }

        fun copyRow(from: Tensor, fromRow: Int, to: Tensor, toRow: Int) {
            val size = from.shape.last().toInt()
            val source = from.floats.duplicate()
            source.limit((fromRow + 1) * size).position(fromRow * size)
            to.floats.duplicate().position(toRow * size).put(source)
        }
    }
}
