package dev.lesonnx

import ai.onnxruntime.OnnxJavaType.FLOAT
import ai.onnxruntime.OnnxJavaType.INT64
import java.nio.FloatBuffer

/**
 * Runs a bundle for one sequence: token ids in, logits out, walking embed, segments with their experts, and head.
 *
 * It samples nothing and decides nothing about loading. Not thread-safe; owns the loader and the twins, once it is made; close it to
 * free sessions and experts.
 */
internal class Runner(
    val bundle: Bundle,
    val loader: ExpertLoader,
    private val platform: Platform,
    /** The chunk in which a prompt runs. */
    val prefillChunkTokens: Int,
    numThreads: Int,
    /** The bundle's twins that are open here. */
    private val twins: Twins = Twins(bundle, platform, "off", numThreads),
) : AutoCloseable {
    private val manifest = bundle.manifest
    private val vocabSize = manifest.model.vocabSize

    /** Turns lookahead off where it does not pay; null leaves it on. */
    var governor: Governor? = null

    /** A limit on the experts beside the budgets of [boundMemory]: what the system's pressure leaves. */
    private var expertLimitBytes: Long? = null
    private var memoryBound: MemoryBound? = null

    /** Who is told what its layers give, if anyone: only then are these outputs asked for. What it keeps counts. Owned by its setter. */
    var layerReader: LayerReader? = null
        set(reader) {
            field = reader
            clearSteps()
            clearMemories { true }
        }

    private val layerIdxs get() = layerReader?.layerIdxs.orEmpty()

    private class MemoryBound(val budgetBytes: Long, val fixedBytes: Long)

    val states = LayerStates(manifest, platform, twins.capacityTokens)
    private val expertBudgetBytes = loader.expertBudgetBytes
    private val parts: DenseParts
    private val hasSharedExperts = manifest.expertLayers.any { it.sharedKind != null }

    // By width, and their memories by the most rows: widths of drafts share one, of wider ones only the last is kept.
    private val steps = HashMap<Int, Step>()
    private val memories = HashMap<Int, StepMemory>()
    private val logits = FloatArray(vocabSize)
    private var draftLogits: DraftLogits? = null
    private var stepRows = 0

    // The tokens of the sequence and where they are, for prompts that begin as it does.
    private val sequence = TokenSequence(manifest.positionRows)

    /** What is needed for a while beside all that [boundMemory] knows of. */
    private var borrowedBytes = 0L

    init {
        try {
            parts = DenseParts(bundle, loader.usesLookahead, numThreads)
        } catch (error: Throwable) {
            states.close()
            throw error
        }
    }

    /** Tokens of the sequence so far. */
    val numTokens: Int get() = states.numTokens

    /** Goes back to the first [numTokens] tokens of the sequence; [InputError] where its states do not reach them. */
    fun rewind(numTokens: Int) = states.rewind(numTokens) { name, inputs, outputs -> parts.bind(name, inputs, outputs).run() }

    /**
     * How many tokens of the sequence, to which it can be rewound, a prompt begins with; at most [atMost].
     *
     * The prompt's last token never counts, since it must run. Image tokens are the same only if their pictures are.
     */
    fun commonTokens(prompt: Prompt, atMost: Int = numTokens): Int =
        states.reachable(sequence.common(prompt, minOf(numTokens, atMost, prompt.size - 1)))

    // ---- budgets

    /**
     * Bounds the process: experts get what is left of [memoryBudgetBytes], less as caches grow. [BudgetError] if that is too
     * little. Call once, before the first step; [drafts] says whether there will be steps with drafts.
     */
    fun boundMemory(memoryBudgetBytes: Long, drafts: Boolean = false) {
        warmUp()
        val fixed = Memory.currentBytes() + platform.heapGrowthBytes() + bufferBytes(drafts) + SPARE_BYTES
        memoryBound = MemoryBound(memoryBudgetBytes, fixed)
        shareMemory(states.capacityFor(1))
    }

    private fun bufferBytes(drafts: Boolean): Long {
        val chunk = prefillChunkTokens
        val steps = 2 * StepMemory.bytesFor(manifest, chunk, layerIdxs.size) + chunk.toLong() * vocabSize / 8
        return steps + states.workingBytes(chunk) + if (drafts) StepMemory.draftBytesFor(manifest, layerIdxs.size) else 0
    }

    /** What it will take beside its sessions for a sequence of that many tokens, with all experts in memory. */
    fun bytesAt(numTokens: Int): Long {
        val experts = (bundle.expertBytes * loader.engine.memoryPerByte).toLong()
        return experts + bufferBytes(drafts = false) + states.bytesAt(states.capacityFor(minOf(numTokens, states.maxTokens)))
    }

    /** Limits the experts beside all else, between two steps; null lifts that. At least what a token needs of a layer is kept. */
    fun limitExperts(numBytes: Long?) {
        expertLimitBytes = numBytes
        shareMemory(states.capacityTokens)
    }

    /**
     * Runs every dense part once on nothing, so that all the weights it maps are counted as this process's. What it leaves in
     * the states is written over by the first step.
     */
    fun warmUp() {
        states.reserve(1)
        states.begin(1)
        val bound = stepFor(1).bound
        bound.embed.run()
        for (place in bound.segments.indices) {
            bound.segments[place].run()
            bound.mixers[place]?.run()
        }
        bound.lookaheads.forEach(Binding::run)
        bound.head.run()
        twins.widths.forEach(::warmUp)
    }

    private fun warmUp(width: TwinWidth) {
        val step = stepFor(width.rows)
        width.begin(step.buffers.positionIds, states.totalSequenceLength)
        for (place in parts.segments.indices) step.runSegment(place, width)
        if (width.hasHead) step.runHead(width)
    }

    /**
     * Experts give way by [numBytes] while [block] runs, where the process is bounded, and get them back. [BudgetError] before any work where
     * the least that they need does not leave so much.
     */
    fun <T> borrow(numBytes: Long, block: () -> T): T {
        borrowedBytes = numBytes
        try {
            shareMemory(states.capacityTokens)
            return block()
        } finally {
            borrowedBytes = 0
            shareMemory(states.capacityTokens)
        }
    }

    /** Gives the experts what budgets, pressure and a capacity of attention caches leave them. */
    private fun shareMemory(capacityTokens: Int) {
        var share = minOf(expertBudgetBytes, bundle.expertBytes)
        memoryBound?.let { bound ->
            val least = if (loader.keepsAll) bundle.expertBytes else bundle.leastBudgetBytes
            val caches = states.bytesAt(capacityTokens) + (layerReader?.bytesAt(capacityTokens) ?: 0)
            val left = ((bound.budgetBytes - bound.fixedBytes - caches - borrowedBytes) / loader.engine.memoryPerByte).toLong()
            if (left < least) {
                throw BudgetError(
                    "the memory budget is ${bound.budgetBytes} bytes; runtime, dense parts and a prefill chunk may take" +
                        " ${bound.fixedBytes}, attention caches of $capacityTokens tokens $caches," +
                        (if (borrowedBytes > 0) " reading a picture $borrowedBytes," else "") + " and the experts need at least $least",
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
    fun prefill(tokenIds: IntArray, beforeChunk: () -> Unit = {}): FloatArray = append(tokenIds, null, beforeChunk)

    /**
     * The same with what [prompt] has behind the tokens of the sequence, which must be its first ones. Every picture of which an image token
     * comes then must have been seen.
     */
    fun prefill(prompt: Prompt, beforeChunk: () -> Unit = {}): FloatArray =
        append(prompt.tokenIds.copyOfRange(minOf(numTokens, prompt.size), prompt.size), prompt, beforeChunk)

    private fun append(tokenIds: IntArray, prompt: Prompt?, beforeChunk: () -> Unit): FloatArray {
        if (tokenIds.isEmpty()) throw InputError("the prompt is empty: at least one token is needed")
        val total = numTokens + tokenIds.size
        if (total > states.maxTokens) throw ContextError("$total tokens do not fit the model's context of ${states.maxTokens}")
        var start = 0
        while (true) {
            beforeChunk()
            val end = minOf(start + prefillChunkTokens, tokenIds.size)
            val isLast = end == tokenIds.size
            val rows = if (isLast) intArrayOf(end - start - 1) else NO_ROWS
            val logits = step(tokenIds.copyOfRange(start, end), 0, prompt) { logits(it, rows) }
            if (isLast) return logits
            start = end
        }
    }

    /**
     * Runs T tokens in one pass; gives the logits [R,V] of the rows asked for (no head where there are none). Those of one row
     * are the runner's array, valid until the next step.
     */
    fun step(tokenIds: IntArray, logitRows: IntArray): FloatArray = step(tokenIds, 0) { logits(it, logitRows) }

    /**
     * Runs a token and drafts of those after it in one pass; gives the logits [V] of each, valid until the next such step. [keep]
     * must follow.
     */
    fun draftStep(tokenIds: IntArray): List<FloatArray> = step(tokenIds, tokenIds.size - 1) { step ->
        val room = draftRoom()
        step.draftHead(room).run()
        room.read(tokenIds.size)
    }

    /** Of the last step, which had drafts, the first rows stay: the others are gone back over and were no use. */
    fun keep(numRows: Int) {
        loader.accept(IntArray(numRows) { it })
        rewind(numTokens - stepRows + numRows)
    }

    /** Makes and binds what a [draftStep] of so many rows needs, so that the first one takes no longer than those after it. */
    fun prepareDrafts(numRows: Int) {
        reserve(numTokens + numRows)
        stepFor(numRows).run {
            bound
            draftHead(draftRoom())
        }
    }

    private fun draftRoom() = draftLogits ?: DraftLogits(vocabSize, platform).also { draftLogits = it }

    private fun <T> step(tokenIds: IntArray, numDrafts: Int, prompt: Prompt? = null, head: (Step) -> T): T {
        for (id in tokenIds) if (id !in 0 until vocabSize) throw InputError("token id $id is outside 0..${vocabSize - 1}")
        val numRows = tokenIds.size
        val total = numTokens + numRows
        reserve(total)
        val step = stepFor(numRows)
        val buffers = step.buffers
        sequence.put(numTokens, tokenIds, prompt)
        for (row in tokenIds.indices) buffers.inputIds.longs.put(row, tokenIds[row].toLong())
        sequence.copyPositions(numTokens, numRows, buffers.positionIds.longs)
        states.begin(numRows)
        loader.beginStep(numRows, numDrafts)
        // Of steps of one row the governor knows which side is faster, and steps with drafts are not far from them; a prefill has
        // too much to read not to look ahead.
        val governor = governor?.takeIf { numRows == 1 }
        val looksAhead = loader.usesLookahead && (governor?.wants() ?: (numDrafts == 0 || this.governor?.isOn != false))
        val stepBegan = System.nanoTime()
        var began = stepBegan
        val bound = step.bound
        val width = widthFor(numRows)
        width?.begin(buffers.positionIds, states.totalSequenceLength)
        bound.embed.run()
        prompt?.copyFeatures(numTokens, total, buffers.hidden.floats)
        for (place in bound.segments.indices) {
            step.runSegment(place, width)
            buffers.work.route(loader.first(place), buffers.topkIds)
            loader.tookDense(System.nanoTime() - began)
            val lookahead = if (looksAhead && place + 1 < bound.segments.size) lookahead(step, place) else null
            loader.runLayer(place, buffers.work, lookahead, bound.mixers[place]?.let { it::run })
            began = System.nanoTime()
        }
        val result = head(step)
        val ended = System.nanoTime()
        loader.tookDense(ended - began)
        governor?.took((ended - stepBegan) / 1e9)
        val position = numTokens
        states.commit(numRows)
        stepRows = numRows
        if (layerIdxs.isNotEmpty()) layerReader?.observe(position, buffers.gatherLayers())
        return result
    }

    /** The twins that a step of that many rows uses; none where somebody reads layers, which twins do not give. */
    private fun widthFor(numRows: Int): TwinWidth? = if (layerIdxs.isEmpty()) twins.forStep(numRows, states) else null

    /** Room for that many tokens in all. The experts give way before the caches grow: the budget holds at every moment. */
    private fun reserve(totalTokens: Int) {
        if (totalTokens <= states.capacityTokens) return
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
        val part = step.bound.lookaheads[place]
        return { ready ->
            for (index in ready.indices) buffers.ready.bytes.put(index, ready[index])
            part.run()
            buffers.lookaheadScores.floats
        }
    }

    /** The head on some rows; without any it still runs where it carries states (dense layers come last), or gives what is read. */
    private fun logits(step: Step, rows: IntArray): FloatArray {
        if (rows.isEmpty() && !parts.headCarriesStates && !step.headIsRead) return NO_LOGITS
        if (rows.size > 1) return manyLogits(step, rows)
        step.headRow.longs.put(0, (rows.firstOrNull() ?: 0).toLong())
        step.runHead(if (step.buffers.numRows == 1) widthFor(1) else null)
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
        if (numRows > REWINDABLE_TOKENS) {
            for (width in steps.keys.filter { it > REWINDABLE_TOKENS }) steps.remove(width)?.let(::closeStep)
            clearMemories { it > REWINDABLE_TOKENS }
        }
        val mostRows = if (numRows > 1) maxOf(numRows, REWINDABLE_TOKENS) else 1
        val memory = memories.getOrPut(mostRows) { StepMemory(manifest, mostRows, layerIdxs, platform) }
        Step(memory, parts, states, numRows, platform).also { steps[numRows] = it }
    }

    private fun clearMemories(which: (mostRows: Int) -> Boolean) {
        for (mostRows in memories.keys.filter(which)) memories.remove(mostRows)?.close()
    }

    private fun clearSteps() {
        steps.values.forEach(::closeStep)
        steps.clear()
    }

    private fun closeStep(step: Step) {
        loader.engine.forget(step.buffers.work)
        step.close()
    }

    override fun close() {
        // First the loader: a step that was broken off may still be predicting.
        loader.close()
        clearSteps()
        clearMemories { true }
        draftLogits?.close()
        twins.close()
        parts.close()
        states.close()
    }

    private companion object {
        /** What ONNX Runtime and the virtual machine take beside what is counted. */
        const val SPARE_BYTES = 48L shl 20
        val NO_ROWS = IntArray(0)
        val NO_LOGITS = FloatArray(0)
    }
}
