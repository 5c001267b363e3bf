package dev.lesonnx

import ai.onnxruntime.OnnxJavaType.FLOAT
import ai.onnxruntime.OnnxJavaType.INT64

/**
 * The buffers of a step of [numRows] rows, and the parts bound to them. Made once a width, valid until a state moves.
 *
 * Owned by a runner, which closes it; owns the buffers, not their memory. Not thread-safe.
 */
internal class Step(
    memory: StepMemory,
    private val parts: DenseParts,
    private val states: LayerStates,
    private val numRows: Int,
    platform: Platform,
) : AutoCloseable {
    val buffers = StepBuffers(memory, numRows)
    private val headArena = TensorArena(platform)
    private val rowsAt = headArena.plan(INT64, 1)
    private val logitsAt = headArena.plan(FLOAT, 1, memory.manifest.model.vocabSize.toLong())

    init {
        headArena.allocate()
    }

    /** What a decode step's head is asked for, and what it gives. */
    val headRow = headArena[rowsAt]
    val headLogits = headArena[logitsAt]

    // By the side of the states that a step reads.
    private val sides = arrayOfNulls<Bound>(2)

    /** The parts, bound for the side on which the states are now. */
    val bound: Bound get() = sides[states.side] ?: Bound().also { sides[states.side] = it }

    /** All parts of a step, in the order of their lists in [DenseParts]; [head] is a decode step's, of one row. */
    inner class Bound {
        val embed = parts.bind(parts.embed.name, mapOf("input_ids" to buffers.inputIds), mapOf("hidden" to buffers.hidden))
        val segments = parts.segments.mapIndexed { place, part -> parts.bind(part.name, inputs(part, place), outputs(part, place)) }
        val mixers = parts.mixers.mapIndexed { place, part -> part?.let { parts.bind(it.name, inputs(it, place), outputs(it, place)) } }
        val lookaheads = parts.lookaheads.mapIndexed { place, part ->
            parts.bind(part.name, inputs(part, place + 1), mapOf("scores" to buffers.lookaheadScores))
        }
        val head = bindHead(headRow, headLogits)
    }

    // By part, those of the head too.
    private val twins = HashMap<String, BoundTwin>()

    /** Segment number [place]: itself, or its twin where the step has twins. */
    fun runSegment(place: Int, width: TwinWidth?) {
        if (width == null) return bound.segments[place].run()
        val part = parts.segments[place]
        twins.getOrPut(part.name) { width.bind(part.name, inputs(part, place), activations(part, place), states) }.run()
    }

    /** The head of a step of one row: itself, or its twin. */
    fun runHead(width: TwinWidth?) {
        if (width == null || !width.hasHead) return bound.head.run()
        twins.getOrPut(parts.head.name) { width.bindHead(inputs(parts.head, parts.segments.size), headLogits, states) }.run()
    }

    /** The head for other rows, on the side of now. */
    fun bindHead(rows: Tensor, logits: Tensor): Binding = parts.bind(
        parts.head.name,
        inputs(parts.head, parts.segments.size) + ("logit_rows" to rows),
        states.outputs(parts.head.name, numRows) + readOf(parts.head) + ("logits" to logits),
    )

    private var draftHeads = arrayOfNulls<Binding>(2)
    private var draftTensors = emptyList<Tensor>()

    /** The head for every row, on the side of now, which writes to [room]. */
    fun draftHead(room: DraftLogits): Binding = draftHeads[states.side] ?: run {
        if (draftTensors.isEmpty()) draftTensors = listOf(room.rows(numRows), room.logits(numRows))
        bindHead(draftTensors[0], draftTensors[1]).also { draftHeads[states.side] = it }
    }

    /** Whether the head gives what a drafter reads. */
    val headIsRead: Boolean = readOf(parts.head).isNotEmpty()

    /** The layer outputs of a part that a drafter reads. */
    private fun readOf(part: Part): Map<String, Tensor> = part.outputs.mapNotNull { value -> buffers.layerOutputs[value.name]?.let { value.name to it } }.toMap()

    /** The tensors that a part reads; [place] counts the segments before it, but for a mixer, whose own is behind it. */
    private fun inputs(part: Part, place: Int): Map<String, Tensor> {
        val before = buffers.streamAfter(place - 1)
        val residual = when {
            part.role == PartRole.MIXER -> buffers.streamAfter(place).residual
            place > 0 && parts.mixers[place - 1] != null -> checkNotNull(buffers.mixedResidual)
            else -> before.residual
        }
        val known = mapOf(
            "hidden" to buffers.hidden,
            "residual" to residual,
            "topk_weights" to before.topkWeights,
            "shared_weights" to before.sharedWeights,
            "expert_out" to buffers.work.expertOut,
            "shared_out" to buffers.work.sharedOut,
            "ready" to buffers.ready,
            "position_ids" to buffers.positionIds,
            "seqlens_k" to states.seqlensK,
            "total_sequence_length" to states.totalSequenceLength,
        ) + states.inputs(part.name)
        return part.inputs.mapNotNull { value -> known[value.name]?.let { value.name to it } }.toMap()
    }

    private fun outputs(part: Part, place: Int): Map<String, Tensor> =
        activations(part, place) + states.outputs(part.name, numRows) + readOf(part)

    /** The tensors that a segment or mixer writes, beside states and what drafters read. */
    private fun activations(part: Part, place: Int): Map<String, Tensor> {
        val after = buffers.streamAfter(place)
        val known = mapOf(
            "residual_out" to if (part.role == PartRole.MIXER) checkNotNull(buffers.mixedResidual) else after.residual,
            "moe_input" to buffers.work.hidden,
            "topk_ids" to buffers.topkIds,
            "topk_weights_out" to after.topkWeights,
            "router_scores" to buffers.routerScores,
            "shared_weights_out" to after.sharedWeights,
        )
        return part.outputs.mapNotNull { value -> known[value.name]?.let { value.name to it } }.toMap()
    }

    override fun close() {
        twins.values.forEach(BoundTwin::close)
        draftTensors.forEach(Tensor::close)
        headArena.close()
        buffers.close()
    }
}
