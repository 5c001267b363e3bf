package dev.lesonnx

import ai.onnxruntime.OnnxJavaType.FLOAT
import ai.onnxruntime.OnnxJavaType.INT64

/**
 * Where the logits of steps with drafts go, all rows of them: one place for every width, made when there is such a step.
 *
 * Owned by a runner, which closes it when no tensor over it is used any more; not thread-safe.
 */
internal class DraftLogits(private val vocabSize: Int, platform: Platform) : AutoCloseable {
    private val arena = TensorArena(platform)
    private val rowsAt = arena.plan(INT64, REWINDABLE_TOKENS.toLong())
    private val logitsAt = arena.plan(FLOAT, REWINDABLE_TOKENS.toLong(), vocabSize.toLong())
    private val copies = ArrayList<FloatArray>()

    init {
        arena.allocate()
        for (row in 0 until REWINDABLE_TOKENS) arena[rowsAt].longs.put(row, row.toLong())
    }

    /** int64 [R]: the first [numRows] rows; the caller closes it. */
    fun rows(numRows: Int): Tensor = arena[rowsAt].beginning(numRows.toLong())

    /** float32 [R,V]; the caller closes it. */
    fun logits(numRows: Int): Tensor = arena[logitsAt].beginning(numRows.toLong(), vocabSize.toLong())

    /** What is there now, row by row; valid until the next call. */
    fun read(numRows: Int): List<FloatArray> {
        val source = arena[logitsAt].floats.duplicate()
        source.position(0)
        while (copies.size < numRows) copies += FloatArray(vocabSize)
        return copies.subList(0, numRows).onEach { source.get(it) }
    }

    override fun close() = arena.close()

    companion object {
        /** What the tensors and their copies take. */
        fun bytesFor(vocabSize: Int): Long = 2L * REWINDABLE_TOKENS * vocabSize * Float.SIZE_BYTES
    }
}
