package dev.lesonnx

import ai.onnxruntime.OnnxJavaType.FLOAT

/** Rows are kept of steps of at most this many tokens: enough to verify drafts, and a prefill's would take too much. */
internal const val REWINDABLE_TOKENS = 16

/** The values that a recurrent layer has in memory at once, in multiples of its rows: 4.4 were measured. */
private const val WORKING_ROWS = 5L

/** Runs a replay part, by its name, on tensors by theirs. */
internal typealias RunPart = (name: String, inputs: Map<String, Tensor>, outputs: Map<String, Tensor>) -> Unit

/** What a bundle's states of fixed shape are and take; immutable. */
internal class FixedStates(manifest: BundleManifest) {
    val states: List<State> = manifest.states.filter { it.replay != null }

    /** Values of a row of each kept output, by its name. */
    val rowSizes: Map<String, Long> = states.flatMap { state ->
        val given = manifest.parts.single { it.name == state.part }.outputs.associateBy { it.name }
        state.rowNames.map { it to (given.getValue(it).shape.last() as Dimension.Fixed).size }
    }.toMap()

    /** Bytes of the buffers, two a state, and of the rows that are kept. */
    val numBytes: Long
        get() = Float.SIZE_BYTES * (2 * states.sumOf(::sizeOf) + REWINDABLE_TOKENS * rowSizes.values.sum())

    /** Bytes that a part takes at most inside a step of that many rows for its layers with such states. */
    fun workingBytes(numRows: Int): Long {
        val widest = states.groupBy { it.part }.values.maxOfOrNull { own -> own.sumOf { state -> state.rowNames.sumOf(rowSizes::getValue) } } ?: 0
        return WORKING_ROWS * widest * numRows * Float.SIZE_BYTES
    }

    /** A state's shape in numbers. */
    fun shapeOf(state: State): LongArray = LongArray(state.shape.size) { (state.shape[it] as Dimension.Fixed).size }

    private fun sizeOf(state: State): Long = shapeOf(state).fold(1L, Math::multiplyExact)
}

/**
 * States of fixed shape (convolutions, recurrences) of one sequence: a step reads one buffer and writes the other.
 *
 * So the state before the last step is there until the next one begins, and a step that breaks off has changed nothing. To go
 * back to a token inside the last step, that state is run again on the step's first rows, which the parts give for it. It
 * knows the manifest's states and no session: whoever asks for a rewind runs the replay parts. Owned by [LayerStates], which
 * closes it; not thread-safe.
 */
internal class StepStates(manifest: BundleManifest, private val platform: Platform) : AutoCloseable {
    private val fixed = FixedStates(manifest)
    private val states = fixed.states
    private val buffers = HashMap<String, TensorArena>()
    private val rowBuffers = TensorArena(platform)
    private val rowNames = fixed.rowSizes.keys.toList()

    // The beginnings of the row buffers that were asked for, by name and number of rows.
    private val rows = HashMap<Pair<String, Int>, Tensor>()

    // The last step: tokens before it, and with it.
    private var first = 0
    private var last = 0

    /** Which of the two buffers is the past of the next step; stays 0 where there are no such states. */
    var side = 0
        private set

    /** What the buffers and the kept rows take. */
    val numBytes: Long get() = fixed.numBytes

    fun workingBytes(numRows: Int): Long = fixed.workingBytes(numRows)

    /** Makes the buffers, zeroed, where they are not there yet. */
    fun allocate() {
        if (states.isEmpty() || buffers.isNotEmpty()) return
        for (state in states) {
            val arena = TensorArena(platform)
            repeat(2) { arena.plan(FLOAT, *fixed.shapeOf(state)) }
            buffers[state.name] = arena.allocate()
        }
        for (name in rowNames) rowBuffers.plan(FLOAT, 1, REWINDABLE_TOKENS.toLong(), fixed.rowSizes.getValue(name))
        rowBuffers.allocate()
    }

    /** What a part reads, by its names; valid until [side] changes. */
    fun inputs(partName: String): Map<String, Tensor> = of(partName).associate { it.input to current(it) }

    /** What a part writes in a step of that many rows; valid until [side] changes. */
    fun outputs(partName: String, numRows: Int): Map<String, Tensor> {
        val own = of(partName)
        val outputs = own.associateTo(HashMap()) { it.output to other(it) }
        // One row leaves nothing between the state before and after it.
        if (numRows in 2..REWINDABLE_TOKENS) own.flatMap { it.rowNames }.associateWithTo(outputs) { keptRows(it, numRows) }
        return outputs
    }

    private fun of(partName: String) = states.filter { it.part == partName }

    /** What the next step reads. */
    private fun current(state: State) = buffers.getValue(state.name)[side]

    /** What the next step writes; until it begins, the state before the last one. */
    private fun other(state: State) = buffers.getValue(state.name)[1 - side]

    private fun keptRows(name: String, numRows: Int): Tensor = rows.getOrPut(name to numRows) {
        rowBuffers[rowNames.indexOf(name)].beginning(1, numRows.toLong(), fixed.rowSizes.getValue(name))
    }

    /** A step begins after that many tokens: what it writes over, nobody can go back to. */
    fun begin(numTokens: Int) {
        first = numTokens
        last = numTokens
    }

    /** The step is done, with it there are that many tokens. */
    fun commit(numTokens: Int) {
        last = numTokens
        turn()
    }

    private fun turn() {
        if (states.isNotEmpty()) side = 1 - side
    }

    /** The most tokens, at most [numTokens], to which a rewind can go. */
    fun reachable(numTokens: Int): Int = when {
        states.isEmpty() || numTokens == last -> numTokens
        numTokens in first until last && last - first <= REWINDABLE_TOKENS -> numTokens
        first <= numTokens -> first
        else -> 0
    }

    /** Goes back to that many tokens; [InputError] where they cannot be reached, and nothing has changed then. */
    fun rewind(numTokens: Int, run: RunPart) {
        if (reachable(numTokens) != numTokens) {
            val inside = if (last - first <= REWINDABLE_TOKENS) "$first to $last" else "$first or $last"
            throw InputError("cannot rewind to $numTokens tokens: the states of this model go back to $inside tokens, or to 0")
        }
        if (states.isEmpty() || numTokens == last) return
        when (numTokens) {
            0 -> states.forEach { zero(current(it)) }
            // The past of the last step is that of the next one again.
            first -> turn()
            else -> states.forEach { replay(it, numTokens - first, run) }
        }
        first = minOf(first, numTokens)
        last = numTokens
    }

    private fun zero(tensor: Tensor) {
        val floats = tensor.floats
        for (index in 0 until floats.capacity()) floats.put(index, 0f)
    }

    /** The state after the first rows of the last step, from the state before it. */
    private fun replay(state: State, numRows: Int, run: RunPart) {
        val replay = checkNotNull(state.replay)
        val kept = replay.rows.mapValues { (_, output) -> keptRows(output, numRows) }
        run(replay.part, kept + ("past" to other(state)), mapOf("present" to current(state)))
    }

    override fun close() {
        rows.values.forEach(Tensor::close)
        rows.clear()
        rowBuffers.close()
        buffers.values.forEach(TensorArena::close)
        buffers.clear()
    }
}
