package dev.lesonnx

import ai.onnxruntime.OnnxJavaType.BOOL
import ai.onnxruntime.OnnxJavaType.FLOAT
import ai.onnxruntime.OnnxJavaType.INT64

/**
 * The tensors of a step of [numRows] rows. Made once a width, so that a step only writes into them. Owned by a runner, which
 * closes them; not thread-safe.
 */
internal class StepBuffers(manifest: BundleManifest, val numRows: Int, platform: Platform) : AutoCloseable {
    private val model = manifest.model
    private val arena = TensorArena(platform)
    private val rows = numRows.toLong()
    private val slots = model.numExpertsPerTok.toLong()
    private val experts = model.numExperts.toLong()
    private val size = model.hiddenSize.toLong()
    private val residualSize = manifest.residualSize

    private val inputIdsAt = arena.plan(INT64, 1, rows)
    private val positionIdsAt = arena.plan(INT64, 1, rows)
    private val hiddenAt = arena.plan(FLOAT, 1, rows, size)
    private val streamsAt = List(2) {
        listOf(arena.plan(FLOAT, 1, rows, residualSize), arena.plan(FLOAT, rows, slots), arena.plan(FLOAT, rows, 1))
    }

    // A mixer may not write the residual that it reads, and the weights beside the other one are in use.
    private val mixedResidualAt =
        if (manifest.parts.any { it.role == PartRole.MIXER }) arena.plan(FLOAT, 1, rows, residualSize) else null
    private val topkIdsAt = arena.plan(INT64, rows, slots)
    private val routerScoresAt = arena.plan(FLOAT, rows, experts)
    private val readyAt = arena.plan(BOOL, rows, slots)
    private val lookaheadScoresAt = arena.plan(FLOAT, rows, experts)

    init {
        arena.allocate()
    }

    val inputIds: Tensor = arena[inputIdsAt]
    val positionIds: Tensor = arena[positionIdsAt]
    val hidden: Tensor = arena[hiddenAt]
    val topkIds: Tensor = arena[topkIdsAt]
    val routerScores: Tensor = arena[routerScoresAt]
    val ready: Tensor = arena[readyAt]
    val lookaheadScores: Tensor = arena[lookaheadScoresAt]

    /** What flows from one part to the next; two of them, since a part may not write what it reads. */
    class Stream(val residual: Tensor, val topkWeights: Tensor, val sharedWeights: Tensor)

    private val streams = streamsAt.map { Stream(arena[it[0]], arena[it[1]], arena[it[2]]) }

    /** What a mixer makes of its segment's residual; null where the bundle has no mixers. */
    val mixedResidual: Tensor? = mixedResidualAt?.let(arena::get)

    /** What segment number [place] leaves. */
    fun streamAfter(place: Int): Stream = streams[place and 1]

    /** What experts read and write. */
    val work: LayerWork = LayerWork(numRows, model.numExpertsPerTok, model.numExperts, model.hiddenSize, platform)

    override fun close() {
        work.close()
        arena.close()
    }

    companion object {
        /** What the tensors of a step of that many rows take, without what ONNX Runtime needs inside a part. */
        fun bytesFor(manifest: BundleManifest, numRows: Int): Long {
            val model = manifest.model
            val slots = model.numExpertsPerTok
            val row = 3 * manifest.residualSize + model.hiddenSize.toLong() * (3 + slots) + 2 * model.numExperts + 8 * slots
            return numRows * row * Float.SIZE_BYTES
        }
    }
}
