package dev.lesonnx

import ai.onnxruntime.OnnxJavaType.FLOAT
import ai.onnxruntime.OnnxJavaType.INT64
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtSession
import java.nio.FloatBuffer

/**
 * Runs a bundle for one sequence: token ids in, logits out, walking embed, segments with their experts, and head.
 *
 * It samples nothing and decides nothing about loading. Not thread-safe; owns the loader, once it is made; close it to free
 * sessions and experts.
 */
internal class Runner(
    val bundle: Bundle,
    val loader: ExpertLoader,
    private val platform: Platform,
    /** The chunk in which a prompt runs. */
    val prefillChunkTokens: Int,
    numThreads: Int,
) : AutoCloseable {
    private val manifest = bundle.manifest
    private val vocabSize = manifest.model.vocabSize

    /** Turns lookahead off where it does not pay; null leaves it on. */
    var governor: Governor? = null

    /** A limit on the experts beside the budgets of [boundMemory]: what the system's pressure leaves. */
    private var expertLimitBytes: Long? = null
    private var memoryBound: MemoryBound? = null

    private class MemoryBound(val budgetBytes: Long, val fixedBytes: Long)

    val states = LayerStates(manifest, platform)
    private val expertBudgetBytes = loader.expertBudgetBytes
    private val sessions = HashMap<String, OrtSession>()
    private val segments = manifest.parts.filter { it.role == PartRole.SEGMENT }
    private val head = manifest.part(PartRole.HEAD)

    /** By the number of the MoE layer before, from which they look. */
    private val lookaheads =
        if (loader.usesLookahead) segments.drop(1).map { manifest.part(PartRole.LOOKAHEAD, it.layerIdx) } else emptyList()
    private val headCarriesStates = manifest.states.any { it.part == head.name }
    private val hasSharedExperts = manifest.expertLayers.any { it.sharedKind != null }

    // By width; beside decode's one row, only the last width is kept.
    private val steps = HashMap<Int, Step>()
    private val logits = FloatArray(vocabSize)

    // The tokens of the sequence, for prompts that begin as it does.
    private var tokens = IntArray(GROWTH_TOKENS)

    init {
        try {
            Ort.sessionOptions(optimise = true, numThreads).use { options ->
                // A lookahead is a row of a router, run beside the experts.
                Ort.sessionOptions(optimise = true, numThreads = 1).use { single ->
                    for (part in manifest.parts) {
                        if (part.role == PartRole.LOOKAHEAD && !loader.usesLookahead) continue
                        val file = bundle.file(part.path)
                        sessions[part.name] = Ort.openSession(file, if (part.role == PartRole.LOOKAHEAD) single else options)
                    }
                }
            }
        } catch (error: Throwable) {
            closeParts()
            throw error
        }
    }

    /** The buffers of a width, and the parts bound to them. Valid until a state moves. */
    private inner class Step(numRows: Int) : AutoCloseable {
        val buffers = StepBuffers(manifest, numRows, platform)
        private val headArena = TensorArena(platform)
        private val rowsAt = headArena.plan(INT64, 1)
        private val logitsAt = headArena.plan(FLOAT, 1, vocabSize.toLong())

        init {
            headArena.allocate()
        }

        val headRow = headArena[rowsAt]
        val headLogits = headArena[logitsAt]
        val embed = bind("embed", mapOf("input_ids" to buffers.inputIds), mapOf("hidden" to buffers.hidden))
        val segments = this@Runner.segments.mapIndexed { place, part -> bind(part.name, inputs(part, place), outputs(part, place)) }
        val lookaheads = this@Runner.lookaheads.mapIndexed { place, part ->
            bind(part.name, inputs(part, place + 1), mapOf("scores" to buffers.lookaheadScores))
        }

        /** A decode step's head, of one row. */
        val head = bindHead(headRow, headLogits)

        fun bindHead(rows: Tensor, logits: Tensor): Binding {
            val part = this@Runner.head
            return bind(
                part.name,
                inputs(part, this@Runner.segments.size) + ("logit_rows" to rows),
                stateOutputs(part) + ("logits" to logits),
            )
        }

        private fun bind(name: String, inputs: Map<String, Tensor>, outputs: Map<String, Tensor>): Binding {
            fun handles(tensors: Map<String, Tensor>): Map<String, OnnxTensor> = tensors.mapValues { it.value.onnx }
            return Binding(sessions.getValue(name), handles(inputs), handles(outputs))
        }

        /** The tensors that a part reads; [place] counts the segments before it. */
        private fun inputs(part: Part, place: Int): Map<String, Tensor> {
            val before = buffers.streamAfter(place - 1)
            val known = mapOf(
                "hidden" to buffers.hidden,
                "residual" to before.residual,
                "topk_weights" to before.topkWeights,
                "shared_weights" to before.sharedWeights,
                "expert_out" to buffers.work.expertOut,
                "shared_out" to buffers.work.sharedOut,
                "ready" to buffers.ready,
                "position_ids" to buffers.positionIds,
                "seqlens_k" to states.seqlensK,
                "total_sequence_length" to states.totalSequenceLength,
            ) + manifest.states.filter { it.part == part.name }.associate { it.input to states.tensor(it.name) }
            return part.inputs.mapNotNull { value -> known[value.name]?.let { value.name to it } }.toMap()
        }

        private fun outputs(part: Part, place: Int): Map<String, Tensor> {
            val after = buffers.streamAfter(place)
            val known = mapOf(
                "residual_out" to after.residual,
                "moe_input" to buffers.work.hidden,
                "topk_ids" to buffers.topkIds,
                "topk_weights_out" to after.topkWeights,
                "router_scores" to buffers.routerScores,
                "shared_weights_out" to after.sharedWeights,
            )
            return part.outputs.mapNotNull { value -> known[value.name]?.let { value.name to it } }.toMap() + stateOutputs(part)
        }

        private fun stateOutputs(part: Part): Map<String, Tensor> =
            manifest.states.filter { it.part == part.name }.associate { it.output to states.tensor(it.name) }

        override fun close() {
            loader.engine.forget(buffers.work)
            headArena.close()
            buffers.close()
        }
    }

    /** Tokens of the sequence so far. */
    val numTokens: Int get() = states.numTokens

    /** Goes back to the first [numTokens] tokens of the sequence. */
    fun rewind(numTokens: Int) = states.rewind(numTokens)

    /** How many tokens of the sequence a prompt begins with; its last token never counts, since it must run. */
    fun commonTokens(tokenIds: IntArray): Int {
        val most = minOf(numTokens, tokenIds.size - 1)
        var count = 0
        while (count < most && tokens[count] == tokenIds[count]) count++
        return count
    }

    // ---- budgets

    /**
     * Bounds the process: experts get what is left of [memoryBudgetBytes], less as caches grow. [BudgetError] if that is too
     * little. Call once, before the first step.
     */
    fun boundMemory(memoryBudgetBytes: Long) {
        warmUp()
        val chunk = prefillChunkTokens
        val buffers = 2 * StepBuffers.bytesFor(manifest, chunk) + chunk.toLong() * vocabSize / 8
        val fixed = Memory.currentBytes() + platform.heapGrowthBytes() + buffers + SPARE_BYTES
        memoryBound = MemoryBound(memoryBudgetBytes, fixed)
        shareMemory(states.capacityFor(1))
    }

    /** Limits the experts beside all else, between two steps; null lifts that. At least what a token needs of a layer is kept. */
    fun limitExperts(numBytes: Long?) {
        expertLimitBytes = numBytes
        shareMemory(states.capacityTokens)
    }

    /**
     * Runs every dense part once on nothing, so that all the weights it maps are counted as this process's. What it leaves in
     * the attention caches is written over by the first step.
     */
    private fun warmUp() {
        states.reserve(1)
        states.begin(1)
        val step = stepFor(1)
        step.embed.run()
        step.segments.forEach(Binding::run)
        step.lookaheads.forEach(Binding::run)
        step.head.run()
    }

    /** Gives the experts what budgets, pressure and a capacity of attention caches leave them. */
    private fun shareMemory(capacityTokens: Int) {
        var share = minOf(expertBudgetBytes, bundle.expertBytes)
        memoryBound?.let { bound ->
            val least = if (loader.keepsAll) bundle.expertBytes else bundle.leastBudgetBytes
            val caches = states.bytesAt(capacityTokens)
            val left = ((bound.budgetBytes - bound.fixedBytes - caches) / loader.engine.memoryPerByte).toLong()
            if (left < least) {
                throw BudgetError(
                    "the memory budget is ${bound.budgetBytes} bytes; runtime, dense parts and a prefill chunk may take" +
                        " ${bound.fixedBytes}, attention caches of $capacityTokens tokens $caches, and the experts need at least $least",
                )
            }
            share = minOf(share, left)
        }
        expertLimitBytes?.let { limit -> share = minOf(share, maxOf(limit, bundle.leastBudgetBytes)) }
        if (share != loader.expertBudgetBytes) loader.pressure(share)
    }

    // ---- steps

    /**
     * Appends tokens in chunks; gives the logits [V] of the last, valid until the next step. [ContextError] before any work.
     * [beforeChunk] is called before each chunk; what it throws ends the prefill, and the sequence has the chunks so far.
     */
    fun prefill(tokenIds: IntArray, beforeChunk: () -> Unit = {}): FloatArray {
        if (tokenIds.isEmpty()) throw InputError("the prompt is empty: at least one token is needed")
        val total = numTokens + tokenIds.size
        if (total > states.maxTokens) throw ContextError("$total tokens do not fit the model's context of ${states.maxTokens}")
        var start = 0
        while (true) {
            beforeChunk()
            val end = minOf(start + prefillChunkTokens, tokenIds.size)
            val isLast = end == tokenIds.size
            val logits = step(tokenIds.copyOfRange(start, end), if (isLast) intArrayOf(end - start - 1) else NO_ROWS)
            if (isLast) return logits
            start = end
        }
    }

    /**
     * Runs T tokens in one pass; gives the logits [R,V] of the rows asked for (no head where there are none). Those of one row
     * are the runner's array, valid until the next step.
     */
    fun step(tokenIds: IntArray, logitRows: IntArray): FloatArray {
        for (id in tokenIds) if (id !in 0 until vocabSize) throw InputError("token id $id is outside 0..${vocabSize - 1}")
        val numRows = tokenIds.size
        val total = numTokens + numRows
        if (total > states.capacityTokens) grow(total)
        val step = stepFor(numRows)
        val buffers = step.buffers
        for (row in tokenIds.indices) {
            buffers.inputIds.longs.put(row, tokenIds[row].toLong())
            buffers.positionIds.longs.put(row, (numTokens + row).toLong())
        }
        states.begin(numRows)
        loader.beginStep(numRows)
        // Of steps of one row the governor knows which side is faster; a prefill has too much to read not to look ahead.
        val governor = governor?.takeIf { numRows == 1 }
        val looksAhead = loader.usesLookahead && governor?.wants() != false
        val stepBegan = System.nanoTime()
        var began = stepBegan
        step.embed.run()
        for (place in segments.indices) {
            step.segments[place].run()
            buffers.work.route(loader.first(place), buffers.topkIds)
            loader.tookDense(System.nanoTime() - began)
            loader.runLayer(place, buffers.work, if (looksAhead && place + 1 < segments.size) lookahead(step, place) else null)
            began = System.nanoTime()
        }
        val result = logits(step, logitRows)
        val ended = System.nanoTime()
        loader.tookDense(ended - began)
        governor?.took((ended - stepBegan) / 1e9)
        if (total > tokens.size) tokens = tokens.copyOf(maxOf(total, 2 * tokens.size))
        tokenIds.copyInto(tokens, numTokens)
        states.commit(numRows)
        return result
    }

    /** The experts give way before the caches grow: the budget holds at every moment. */
    private fun grow(totalTokens: Int) {
        if (totalTokens > states.maxTokens) {
            throw ContextError("$totalTokens tokens do not fit the model's context of ${states.maxTokens}")
        }
        shareMemory(states.capacityFor(totalTokens))
        clearSteps()
        states.reserve(totalTokens)
    }

    /** The prediction of the MoE layer after number [place]. */
    private fun lookahead(step: Step, place: Int): LookaheadRun {
        val buffers = step.buffers
        if (hasSharedExperts) {
            // What an earlier layer left there must not count as this layer's.
            val shared = buffers.work.sharedOut.floats
            for (index in 0 until shared.capacity()) shared.put(index, 0f)
        }
        return { ready ->
            for (index in ready.indices) buffers.ready.bytes.put(index, ready[index])
            step.lookaheads[place].run()
            buffers.lookaheadScores.floats
        }
    }

    /** The head on some rows; without any it still runs where it carries states (dense layers come last). */
    private fun logits(step: Step, rows: IntArray): FloatArray {
        if (rows.isEmpty() && !headCarriesStates) return NO_LOGITS
        if (rows.size > 1) return manyLogits(step, rows)
        step.headRow.longs.put(0, (rows.firstOrNull() ?: 0).toLong())
        step.head.run()
        if (rows.isEmpty()) return NO_LOGITS
        copy(step.headLogits.floats, logits)
        return logits
    }

    private fun manyLogits(step: Step, rows: IntArray): FloatArray = TensorArena(platform).use { arena ->
        val rowsAt = arena.plan(INT64, rows.size.toLong())
        val logitsAt = arena.plan(FLOAT, rows.size.toLong(), vocabSize.toLong())
        arena.allocate()
        for (index in rows.indices) arena[rowsAt].longs.put(index, rows[index].toLong())
        step.bindHead(arena[rowsAt], arena[logitsAt]).run()
        FloatArray(rows.size * vocabSize).also { copy(arena[logitsAt].floats, it) }
    }

    private fun copy(from: FloatBuffer, to: FloatArray) {
        from.duplicate().position(0).get(to)
    }

    private fun stepFor(numRows: Int): Step = steps[numRows] ?: run {
        for (width in steps.keys.filter { it != 1 }) steps.remove(width)?.close()
        Step(numRows).also { steps[numRows] = it }
    }

    private fun clearSteps() {
        steps.values.forEach(Step::close)
        steps.clear()
    }

    override fun close() {
        // First the loader: a step that was broken off may still be predicting.
        loader.close()
        closeParts()
    }

    private fun closeParts() {
        clearSteps()
        sessions.values.forEach(OrtSession::close)
        sessions.clear()
        states.close()
    }

    private companion object {
        /** What ONNX Runtime and the virtual machine take beside what is counted. */
        const val SPARE_BYTES = 48L shl 20
        val NO_ROWS = IntArray(0)
        val NO_LOGITS = FloatArray(0)
    }
}
