package dev.lesonnx

import ai.onnxruntime.OnnxJavaType.INT32

/** Attention caches grow by this many tokens at a time. */
internal const val GROWTH_TOKENS = 512

/**
 * The tensors a sequence carries from step to step: attention caches that grow, and states of fixed shape.
 *
 * A cache is one buffer, bound as past and present, and rewinds by stating a smaller length; [StepStates] says how far the
 * others go back. Lengths lie in tensors that parts are bound to, so a step only writes numbers. Caches hold [leastCapacityTokens] from
 * the start. Owned by a runner, which closes it; not thread-safe.
 */
internal class LayerStates(manifest: BundleManifest, private val platform: Platform, private val leastCapacityTokens: Int = 0) : AutoCloseable {
    private class Cache(val memory: NativeMemory, val tensor: Tensor) : AutoCloseable {
        override fun close() {
            tensor.close()
            memory.close()
        }
    }

    private val states = manifest.states.filter { it.isAttention }
    private val fixed = StepStates(manifest, platform)
    private val caches = HashMap<String, Cache>()
    private val lengths = TensorArena(platform)
    private val seqlensAt: Int
    private val totalAt: Int

    /** The model's context. */
    val maxTokens = manifest.model.maxPositionEmbeddings

    /** Tokens of the sequence so far. */
    var numTokens = 0
        private set

    /** Tokens that the caches have room for. */
    var capacityTokens = 0
        private set

    init {
        seqlensAt = lengths.plan(INT32, 1)
        totalAt = lengths.plan(INT32)
        lengths.allocate()
    }

    /** int32 [1]: tokens before the step plus T, minus one. */
    val seqlensK: Tensor get() = lengths[seqlensAt]

    /** int32 scalar: tokens before the step plus T. */
    val totalSequenceLength: Tensor get() = lengths[totalAt]

    /** Which of the buffers of fixed shape the next step reads: bindings hold for one side. */
    val side: Int get() = fixed.side

    /** What a part reads its states from, by its names; valid until [reserve] makes room or [side] changes. */
    fun inputs(partName: String): Map<String, Tensor> = caches(partName) { it.input } + fixed.inputs(partName)

    /** What a part writes its states to in a step of that many rows; valid as what it reads. */
    fun outputs(partName: String, numRows: Int): Map<String, Tensor> = caches(partName) { it.output } + fixed.outputs(partName, numRows)

    private fun caches(partName: String, name: (State) -> String): Map<String, Tensor> =
        states.filter { it.part == partName }.associate { name(it) to caches.getValue(it.name).tensor }

    /** The capacity that holds that many tokens. */
    fun capacityFor(numTokens: Int): Int = when {
        numTokens <= leastCapacityTokens -> leastCapacityTokens
        else -> minOf((numTokens + GROWTH_TOKENS - 1) / GROWTH_TOKENS * GROWTH_TOKENS, maxOf(maxTokens, numTokens))
    }

    /** What the states take at a capacity. */
    fun bytesAt(capacityTokens: Int): Long = states.sumOf { Tensor.bytesOf(it.dtype.onnx, shape(it, capacityTokens)) } + fixed.numBytes

    /** What recurrent layers take for themselves inside a step of that many rows. */
    fun workingBytes(numRows: Int): Long = fixed.workingBytes(numRows)

    /** Makes room for that many tokens in all; tensors may change. [ContextError] beyond the model's context. */
    fun reserve(numTokens: Int) {
        if (numTokens > maxTokens) throw ContextError("$numTokens tokens do not fit the model's context of $maxTokens")
        if (numTokens <= capacityTokens) return
        fixed.allocate()
        val capacity = capacityFor(numTokens)
        // One after the other, so that at most one cache is there twice.
        for (state in states) {
            val shape = shape(state, capacity)
            val memory = platform.allocate(Tensor.bytesOf(state.dtype.onnx, shape))
            val grown = Cache(memory, Tensor(state.dtype.onnx, shape, memory.buffer))
            caches.put(state.name, grown)?.use { copy(it.tensor, grown.tensor) }
        }
        capacityTokens = capacity
    }

    /** Copies the tokens so far, head by head. */
    private fun copy(from: Tensor, to: Tensor) {
        val heads = from.shape[1].toInt()
        val length = numTokens * from.shape[3].toInt() * from.type.size
        for (head in 0 until heads) {
            val source = from.bytes.duplicate()
            val begin = from.bytes.capacity() / heads * head
            source.limit(begin + length).position(begin)
            to.bytes.duplicate().position(to.bytes.capacity() / heads * head).put(source)
        }
    }

    private fun shape(state: State, capacityTokens: Int) =
        LongArray(state.shape.size) { place -> (state.shape[place] as? Dimension.Fixed)?.size ?: capacityTokens.toLong() }

    /** Puts a step's rows [1, heads, T, size] into attention caches, by the states' names: twins do not. */
    fun writeRows(rows: Map<String, Tensor>) {
        for ((name, tensor) in rows) {
            val cache = caches.getValue(name).tensor
            val heads = cache.shape[1].toInt()
            val size = cache.shape[3].toInt() * cache.type.size
            val length = tensor.bytes.capacity() / heads
            for (head in 0 until heads) {
                val source = tensor.bytes.duplicate().limit((head + 1) * length).position(head * length)
                cache.bytes.duplicate().position(cache.bytes.capacity() / heads * head + numTokens * size).put(source)
            }
        }
    }

    /** States the lengths of a step of that many rows; room must have been reserved. */
    fun begin(numRows: Int) {
        seqlensK.ints.put(0, numTokens + numRows - 1)
        totalSequenceLength.ints.put(0, numTokens + numRows)
        fixed.begin(numTokens)
    }

    /** The step's rows are part of the sequence. */
    fun commit(numRows: Int) {
        numTokens += numRows
        fixed.commit(numTokens)
    }

    /** The most tokens, at most [numTokens], to which [rewind] can go back. */
    fun reachable(numTokens: Int): Int = fixed.reachable(numTokens)

    /**
     * Goes back to the first [numTokens] tokens; [run] runs a replay part. Attention needs no more than the smaller number.
     * [InputError] where states of fixed shape do not reach that far.
     */
    fun rewind(numTokens: Int, run: RunPart) {
        require(numTokens in 0..this.numTokens) { "cannot rewind to $numTokens of ${this.numTokens} tokens" }
        fixed.rewind(numTokens, run)
        this.numTokens = numTokens
    }

    override fun close() {
        caches.values.forEach(Cache::close)
        caches.clear()
        fixed.close()
        lengths.close()
        numTokens = 0
        capacityTokens = 0
    }
}
