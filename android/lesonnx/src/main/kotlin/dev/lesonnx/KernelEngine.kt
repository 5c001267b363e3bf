package dev.lesonnx

import ai.onnxruntime.OnnxJavaType.INT64
import ai.onnxruntime.OnnxJavaType.UINT8
import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtSession
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.util.concurrent.locks.ReentrantReadWriteLock
import kotlin.concurrent.read
import kotlin.concurrent.write

/**
 * The `kernel` engine: experts computed by the operator `lesonnx::Experts` straight from the bytes of the pack.
 *
 * The cache is a few large pieces of memory; a load is one direct read to its place and nothing else. [load] is
 * thread-safe, the rest belongs to one thread.
 */
internal class KernelEngine(private val bundle: Bundle, private val platform: Platform, numThreads: Int) : ExpertEngine {
    override val name = "kernel"
    override val notes = emptyList<String>()
    override val memoryPerByte = 1.0

    private val packs = HashMap<Int, ExpertPack>()

    // Closing them unloads the kernel's library, so they live as long as the sessions.
    private val options = Ort.sessionOptions(optimise = false, numThreads)
    private val stages = ArrayList<OrtSession>()
    private val experts = bundle.experts

    // Where experts lie: written by reading threads, read by the computing one once the scheduler's lock has passed between.
    private val slabOf = IntArray(experts.size) { NOWHERE }
    private val offsetOf = LongArray(experts.size)

    private var slabs = emptyArray<Slab>()
    private var pieces = emptyArray<Piece>()

    // Reads hold it shared; a change of the pieces waits for them, and they for it.
    private val pieceLock = ReentrantReadWriteLock()

    // Decode steps and those with drafts bind the same tensors every time.
    private val bindings = HashMap<BindingKey, StageRun>()

    init {
        try {
            for (layer in bundle.manifest.expertLayers) {
                packs[layer.layerIdx] = ExpertPack(bundle.packFile(layer.layerIdx), platform)
            }
            try {
                options.registerCustomOpLibrary(platform.kernelLibrary())
            } catch (error: OrtException) {
                throw InputError("the kernel's library cannot be used: ${Ort.firstLine(error)}")
            }
            for (kind in bundle.manifest.expertKinds) {
                val stage = kind.stage ?: throw BundleError("${bundle.directory}: a kind of expert has no stage; export it again")
                stages += Ort.openSession(bundle.file(stage), options)
            }
        } catch (error: Throwable) {
            close()
            throw error
        }
    }

    /** Lengths are whole pages. Several slabs make a piece, so that a batch whose experts lie in several is one run. */
    private class Slab(val piece: Int) {
        var lengthBytes = 0L

        /** Where it begins in its piece. */
        var start = 0L
    }

    /** A piece of memory and its tensor, allocated when the first expert comes. */
    private inner class Piece(val slabs: List<Slab>) {
        private var memory: NativeMemory? = null
        lateinit var tensor: Tensor
            private set
        val lengthBytes get() = slabs.sumOf { it.lengthBytes }
        val isThere get() = memory != null

        @Synchronized
        fun bytes(): ByteBuffer = (memory ?: create()).buffer

        private fun create(): NativeMemory = platform.allocate(lengthBytes).also {
            memory = it
            tensor = Tensor(UINT8, longArrayOf(lengthBytes), it.buffer)
        }

        fun free() {
            if (memory != null) tensor.close()
            memory?.close()
            memory = null
        }
    }

    private data class BindingKey(
        val work: LayerWork,
        val kind: Int,
        val piece: Int,
        val numExperts: Int,
        val numRows: Int,
        val isShared: Boolean,
    )

    /** A run of [numExperts] experts with [numRows] rows in all: tensors over the work's own room for them. */
    private class StageRun(stage: OrtSession, cache: Tensor, work: LayerWork, isShared: Boolean, numExperts: Int, numRows: Int) : AutoCloseable {
        private val tensors = listOf(
            beginning(work.offsets, numExperts),
            beginning(work.rowStarts, numExperts + 1),
            beginning(work.rows, numRows),
        )
        private val binding = Binding(
            stage,
            mapOf(
                "hidden" to work.hidden.onnx,
                "cache" to cache.onnx,
                "offsets" to tensors[0].onnx,
                "row_starts" to tensors[1].onnx,
                "rows" to tensors[2].onnx,
            ),
            mapOf("expert_out" to (if (isShared) work.sharedOutSlots else work.expertOut).onnx),
        )

        fun run() = binding.run()

        override fun close() = tensors.forEach(Tensor::close)

        private fun beginning(tensor: Tensor, length: Int): Tensor {
            val bytes = tensor.bytes.duplicate().limit(length * Long.SIZE_BYTES).slice().order(ByteOrder.nativeOrder())
            return Tensor(INT64, longArrayOf(length.toLong()), bytes)
        }
    }

    override fun resize(slabBytes: LongArray) {
        if (pieces.isEmpty()) makePieces(slabBytes)
        check(slabBytes.size == slabs.size) { "${slabBytes.size} slabs, expected ${slabs.size}" }
        pieceLock.write {
            for ((number, piece) in pieces.withIndex()) {
                val changes = slabs.indices.any { slabs[it].piece == number && slabs[it].lengthBytes != slabBytes[it] }
                if (changes) rebuild(number, piece, slabBytes)
            }
        }
    }

    private fun makePieces(slabBytes: LongArray) {
        var piece = -1
        var filled = MAX_PIECE_BYTES
        slabs = Array(slabBytes.size) { number ->
            if (filled + slabBytes[number] > MAX_PIECE_BYTES) {
                piece++
                filled = 0
            }
            filled += slabBytes[number]
            Slab(piece)
        }
        pieces = Array(piece + 1) { number -> Piece(slabs.filter { it.piece == number }) }
    }

    /**
     * Gives a piece another length. Java cannot give a part of a buffer back, so the whole goes, a new one comes, and what it
     * held is read again: memory never holds both.
     */
    private fun rebuild(number: Int, piece: Piece, slabBytes: LongArray) {
        dropBindings()
        val wasThere = piece.isThere
        piece.free()
        var start = 0L
        for (index in slabs.indices) {
            val slab = slabs[index]
            if (slab.piece != number) continue
            slab.lengthBytes = slabBytes[index]
            slab.start = start
            start += slab.lengthBytes
        }
        if (!wasThere) return
        for (expert in experts) {
            val slab = slabOf[expert.number]
            if (slab == NOWHERE || slabs[slab].piece != number) continue
            try {
                read(expert, slab, offsetOf[expert.number])
            } catch (error: java.io.IOException) {
                throw LoadError("$expert cannot be loaded again after a change of the budget: ${error.message}")
            }
        }
    }

    override fun load(expert: Expert, slab: Int, offsetBytes: Long): Long {
        pieceLock.read {
            read(expert, slab, offsetBytes)
            offsetOf[expert.number] = offsetBytes
            slabOf[expert.number] = slab
        }
        return expert.costBytes
    }

    private fun read(expert: Expert, slab: Int, offsetBytes: Long) {
        val begin = slabs[slab].start + offsetBytes
        val target = pieces[slabs[slab].piece].bytes().duplicate()
        target.limit((begin + expert.costBytes).toInt()).position(begin.toInt())
        packs.getValue(expert.layerIdx).readInto(target, expert.offsetBytes)
    }

    override fun compute(experts: IntArray, work: LayerWork) {
        // A run takes one kind and one piece of memory: almost always one run, two with a shared expert.
        var left = experts.size
        var piece = 0
        while (left > 0) {
            left -= computeGroup(experts, piece, false, work)
            left -= computeGroup(experts, piece, true, work)
            piece++
        }
    }

    /** Computes those of the experts that lie in the piece and are shared, or not; gives their number. */
    private fun computeGroup(numbers: IntArray, piece: Int, isShared: Boolean, work: LayerWork): Int {
        val (offsets, rowStarts, rows) = Triple(work.offsets.longs, work.rowStarts.longs, work.rows.longs)
        var numExperts = 0
        var numRows = 0
        var kind = 0
        rowStarts.put(0, 0)
        for (number in numbers) {
            val slab = slabs[slabOf[number]]
            val expert = experts[number]
            if (slab.piece != piece || (expert.expertIdx == null) != isShared) continue
            kind = expert.kindIdx
            offsets.put(numExperts, slab.start + offsetOf[number])
            val count = if (isShared) work.numRows else work.numRowsOf(number)
            for (index in 0 until count) rows.put(numRows + index, (if (isShared) index else work.place(number, index)).toLong())
            numRows += count
            rowStarts.put(++numExperts, numRows.toLong())
        }
        if (numExperts > 0) run(kind, piece, isShared, numExperts, numRows, work)
        return numExperts
    }

    private fun run(kind: Int, piece: Int, isShared: Boolean, numExperts: Int, numRows: Int, work: LayerWork) {
        if (work.numRows > REWINDABLE_TOKENS) {
            StageRun(stages[kind], pieces[piece].tensor, work, isShared, numExperts, numRows).use(StageRun::run)
            return
        }
        if (bindings.size >= MAX_BINDINGS) dropBindings()
        bindings.getOrPut(BindingKey(work, kind, piece, numExperts, numRows, isShared)) {
            StageRun(stages[kind], pieces[piece].tensor, work, isShared, numExperts, numRows)
        }.run()
    }

    override fun evict(expert: Expert) {
        slabOf[expert.number] = NOWHERE
    }

    override fun forget(work: LayerWork) {
        for (key in bindings.keys.filter { it.work === work }) bindings.remove(key)?.close()
    }

    private fun dropBindings() {
        bindings.values.forEach(StageRun::close)
        bindings.clear()
    }

    override fun close() {
        dropBindings()
        slabOf.fill(NOWHERE)
        pieceLock.write { pieces.forEach(Piece::free) }
        stages.forEach(OrtSession::close)
        stages.clear()
        options.close()
        packs.values.forEach(ExpertPack::close)
        packs.clear()
    }

    companion object {
        /** Buffers of Java end at 2 GiB. */
        private const val MAX_PIECE_BYTES = 1L shl 30
        private const val MAX_BINDINGS = 512
        private const val NOWHERE = -1

        /** Why the kernel cannot be used for a bundle here; null where it can. */
        fun whyNot(bundle: Bundle, platform: Platform): String? = when {
            platform.kernelLibrary() == null -> "its library is not there"
            bundle.manifest.expertKinds.any { it.stage == null } -> "the bundle has no stages (export it again)"
            else -> null
        }
    }
}
