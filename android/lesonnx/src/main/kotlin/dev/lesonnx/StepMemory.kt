package dev.lesonnx

import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxJavaType.BOOL
import ai.onnxruntime.OnnxJavaType.FLOAT
import ai.onnxruntime.OnnxJavaType.INT64

/**
 * The memory of steps of up to [maxRows] rows: steps of fewer take the beginnings of the same tensors, so widths can be many.
 *
 * [layerIdxs] are the layers whose outputs are read. Owned by a runner, which closes it when no tensor over it is used any more;
 * not thread-safe.
 */
internal class StepMemory(val manifest: BundleManifest, private val maxRows: Int, val layerIdxs: List<Int>, platform: Platform) : AutoCloseable {
    private class Place(val number: Int, val shape: (rows: Long) -> LongArray)

    private val arena = TensorArena(platform)
    private val places = HashMap<String, Place>()

    init {
        val model = manifest.model
        val size = model.hiddenSize.toLong()
        val slots = model.numExpertsPerTok.toLong()
        val experts = model.numExperts.toLong()
        val residualSize = manifest.residualSize
        plan("input_ids", INT64) { longArrayOf(1, it) }
        val positionRows = manifest.positionRows.toLong()
        plan("position_ids", INT64) { if (positionRows == 1L) longArrayOf(1, it) else longArrayOf(positionRows, 1, it) }
        plan("hidden", FLOAT) { longArrayOf(1, it, size) }
        for (stream in 0..1) {
            plan("residual $stream", FLOAT) { longArrayOf(1, it, residualSize) }
            plan("topk_weights $stream", FLOAT) { longArrayOf(it, slots) }
            plan("shared_weights $stream", FLOAT) { longArrayOf(it, 1) }
        }
        // A mixer may not write the residual that it reads, and the weights beside the other one are in use.
        if (hasMixers) plan("mixed_residual", FLOAT) { longArrayOf(1, it, residualSize) }
        plan("topk_ids", INT64) { longArrayOf(it, slots) }
        plan("router_scores", FLOAT) { longArrayOf(it, experts) }
        plan("ready", BOOL) { longArrayOf(it, slots) }
        plan("lookahead_scores", FLOAT) { longArrayOf(it, experts) }
        // What experts read and write, and what the kernel's operator is told: as many experts, starts and rows as there can be.
        plan("moe_input", FLOAT) { longArrayOf(it, size) }
        plan("expert_out", FLOAT) { longArrayOf(it, slots, size) }
        plan("shared_out", FLOAT) { longArrayOf(it, size) }
        plan("offsets", INT64) { longArrayOf(experts + 1) }
        plan("row_starts", INT64) { longArrayOf(experts + 2) }
        plan("rows", INT64) { longArrayOf(it * slots) }
        // What a drafter reads: each layer's, and side by side. That of the embedding lasts as long as a step.
        for (idx in layerIdxs) if (idx != EMBEDDING_IDX) plan(layerOutputName(idx), FLOAT) { longArrayOf(1, it, size) }
        if (layerIdxs.isNotEmpty()) plan("layer_rows", FLOAT) { longArrayOf(it, layerIdxs.size * size) }
        arena.allocate()
    }

    val hasMixers: Boolean get() = manifest.parts.any { it.role == PartRole.MIXER }

    private fun plan(name: String, type: OnnxJavaType, shape: (rows: Long) -> LongArray) {
        places[name] = Place(arena.plan(type, *shape(maxRows.toLong())), shape)
    }

    /** The tensor of that name for a step of [numRows] rows; the caller closes it. */
    fun beginning(name: String, numRows: Int): Tensor {
        val place = places.getValue(name)
        return arena[place.number].beginning(*place.shape(numRows.toLong()))
    }

    override fun close() = arena.close()

    companion object {
        /** What steps with drafts take beside the others. */
        fun draftBytesFor(manifest: BundleManifest, numLayersRead: Int): Long =
            bytesFor(manifest, REWINDABLE_TOKENS, numLayersRead) + DraftLogits.bytesFor(manifest.model.vocabSize)

        /** What a step of that many rows takes, without what ONNX Runtime needs inside a part. */
        fun bytesFor(manifest: BundleManifest, numRows: Int, numLayersRead: Int = 0): Long {
            val model = manifest.model
            val slots = model.numExpertsPerTok
            val row = 3 * manifest.residualSize + model.hiddenSize.toLong() * (3 + slots + 2 * numLayersRead) + 2 * model.numExperts + 8 * slots
            return numRows * row * Float.SIZE_BYTES
        }
    }
}
