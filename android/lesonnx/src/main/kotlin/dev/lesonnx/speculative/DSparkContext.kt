package dev.lesonnx.speculative

import ai.onnxruntime.OnnxJavaType.FLOAT
import ai.onnxruntime.OnnxJavaType.INT64
import dev.lesonnx.Binding
import dev.lesonnx.DrafterRecord
import dev.lesonnx.GROWTH_TOKENS
import dev.lesonnx.ModelFacts
import dev.lesonnx.NativeMemory
import dev.lesonnx.PartRole
import dev.lesonnx.Platform
import dev.lesonnx.Tensor
import dev.lesonnx.TensorArena
import java.nio.ByteOrder

/** Binds a part of a drafter, by its role, to tensors by their names. */
internal typealias BindPart = (role: PartRole, inputs: Map<String, Tensor>, outputs: Map<String, Tensor>) -> Binding

/**
 * What a DSpark drafter keeps of the tokens so far: keys and values, and the rows of layer outputs that are not projected yet.
 *
 * Rows are projected when a draft needs them, or when there are [PENDING_TOKENS]: few runs of many rows cost less than many of one, and
 * what is kept unprojected stays small. Owned by a drafter, which closes it; not thread-safe.
 */
internal class DSparkContext(record: DrafterRecord, model: ModelFacts, private val platform: Platform, private val bind: BindPart) : AutoCloseable {
    private val width = record.targetLayerIds.size * model.hiddenSize
    private val sizes = record.cacheSizes
    private val maxTokens = model.maxPositionEmbeddings
    private val caches = HashMap<String, NativeMemory>()
    private var capacityTokens = 0

    private val arena = TensorArena(platform)
    private val pendingAt = arena.plan(FLOAT, PENDING_TOKENS.toLong(), width.toLong())

    // Tokens whose keys and values are in the caches, and those behind them whose rows are kept.
    private var numProjected = 0
    private var numPending = 0

    init {
        arena.allocate()
    }

    /** Tokens of the sequence, from its beginning, whose layer outputs it has. */
    val numTokens: Int get() = numProjected + numPending

    /** Outputs [T, n*H] of the tokens from [position] on; what it had from there on is forgotten. */
    fun observe(position: Int, layerOutputs: Tensor) {
        check(position <= numTokens) { "the drafter has seen $numTokens tokens, and is told of token $position" }
        rewind(position)
        val count = layerOutputs.shape[0].toInt()
        if (numPending + count > PENDING_TOKENS) flush()
        if (count > PENDING_TOKENS) {
            project(layerOutputs)
            return
        }
        val source = layerOutputs.floats.duplicate()
        source.position(0)
        arena[pendingAt].floats.duplicate().position(numPending * width).put(source.limit(count * width))
        numPending += count
    }

    /** Forgets what comes behind the first [numTokens] tokens: two numbers, nothing is moved. */
    fun rewind(numTokens: Int) {
        numProjected = minOf(numProjected, numTokens)
        numPending = minOf(numPending, numTokens - numProjected)
    }

    /** The caches [1, P, W] of all tokens, by name, while [block] runs. */
    fun <T> withCaches(block: (caches: Map<String, Tensor>) -> T): T {
        flush()
        return useCaches(0, numProjected, block)
    }

    /** Projects the rows that are pending. */
    private fun flush() {
        if (numPending == 0) return
        val count = numPending
        numPending = 0
        arena[pendingAt].beginning(count.toLong(), width.toLong()).use(::project)
    }

    /** Appends rows [T, n*H] to the caches. */
    private fun project(rows: Tensor) {
        val first = numProjected
        val count = rows.shape[0]
        reserve(first + count.toInt())
        TensorArena(platform).use { step ->
            val positionsAt = step.plan(INT64, 1, count)
            val positions = step.allocate()[positionsAt]
            for (row in 0 until count.toInt()) positions.longs.put(row, (first + row).toLong())
            rows.withShape(1, count, width.toLong()).use { outputs ->
                useCaches(first, first + count.toInt()) { added ->
                    bind(PartRole.DRAFTER_CONTEXT, mapOf("layer_outputs" to outputs, "position_ids" to positions), added).run()
                }
            }
        }
        numProjected = first + count.toInt()
    }

    /** The entries of tokens [first] to before [end] of every cache. */
    private fun <T> useCaches(first: Int, end: Int, block: (Map<String, Tensor>) -> T): T {
        val views = sizes.mapValues { (name, size) -> view(name, size, first, end) }
        try {
            return block(views)
        } finally {
            views.values.forEach(Tensor::close)
        }
    }

    private fun view(name: String, size: Long, first: Int, end: Int): Tensor {
        val row = (size * Float.SIZE_BYTES).toInt()
        val bytes = caches.getValue(name).buffer.duplicate().limit(end * row).position(first * row).slice().order(ByteOrder.nativeOrder())
        return Tensor(FLOAT, longArrayOf(1, (end - first).toLong(), size), bytes)
    }

    /** Room for that many tokens: caches grow as attention's do. */
    private fun reserve(numTokens: Int) {
        if (numTokens <= capacityTokens) return
        val capacity = capacityFor(numTokens)
        // One after the other, so that at most one cache is there twice.
        for ((name, size) in sizes) {
            val row = (size * Float.SIZE_BYTES).toInt()
            val grown = platform.allocate(capacity.toLong() * row)
            caches.put(name, grown)?.use { old -> grown.buffer.duplicate().put(old.buffer.duplicate().limit(numProjected * row)) }
        }
        capacityTokens = capacity
    }

    private fun capacityFor(numTokens: Int): Int =
        minOf((numTokens + GROWTH_TOKENS - 1) / GROWTH_TOKENS * GROWTH_TOKENS, maxOf(maxTokens, numTokens))

    /** What caches and pending rows take for a sequence of that many tokens. */
    fun bytesAt(numTokens: Int): Long =
        (capacityFor(numTokens) * sizes.values.sum() + PENDING_TOKENS.toLong() * width) * Float.SIZE_BYTES

    /** Projects a row of zeros, lets [block] use the caches with it, and forgets it. Before there are tokens. */
    fun warmUp(block: (caches: Map<String, Tensor>) -> Unit) {
        TensorArena(platform).use { step ->
            val rowAt = step.plan(FLOAT, 1, width.toLong())
            observe(0, step.allocate()[rowAt])
        }
        withCaches(block)
        rewind(0)
    }

    override fun close() {
        caches.values.forEach(NativeMemory::close)
        caches.clear()
        arena.close()
    }

    companion object {
        /** Rows that wait to be projected together. */
        const val PENDING_TOKENS = 64
    }
}
