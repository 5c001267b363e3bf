package dev.lesonnx.speculative

import ai.onnxruntime.OnnxJavaType.FLOAT
import ai.onnxruntime.OnnxJavaType.INT64
import dev.lesonnx.Binding
import dev.lesonnx.DrafterRecord
import dev.lesonnx.ModelFacts
import dev.lesonnx.PartRole
import dev.lesonnx.Platform
import dev.lesonnx.Tensor
import dev.lesonnx.TensorArena
import java.nio.ByteOrder

/** The buffers of one draft: B slots, one after the other. Owned by a drafter, which closes it; not thread-safe. */
internal class DSparkBlock(private val record: DrafterRecord, private val model: ModelFacts, platform: Platform, private val bind: BindPart) : AutoCloseable {
    private val size = record.blockSize
    private val arena = TensorArena(platform)
    private val idsAt = arena.plan(INT64, 1, size.toLong())
    private val positionsAt = arena.plan(INT64, 1, size.toLong())
    private val rowsAt = arena.plan(INT64, size.toLong())
    private val hiddenAt = arena.plan(FLOAT, size.toLong(), model.hiddenSize.toLong())
    private val baseLogitsAt = arena.plan(FLOAT, size.toLong(), model.vocabSize.toLong())
    private val tokenAt = arena.plan(INT64, 1)
    private val logitsAt = arena.plan(FLOAT, 1, model.vocabSize.toLong())
    private val confidenceAt = arena.plan(FLOAT, 1)
    private val logits = FloatArray(model.vocabSize)

    // The Markov part bound to each slot's rows, made on first use, and the tensors over those rows.
    private val chain = HashMap<Int, Binding>()
    private val rowTensors = ArrayList<Tensor>()

    init {
        arena.allocate()
        for (slot in 0 until size) {
            arena[idsAt].longs.put(slot, record.maskTokenId.toLong())
            arena[rowsAt].longs.put(slot, slot.toLong())
        }
        arena[confidenceAt].floats.put(0, 1f)
    }

    /** How likely the slot is right that [slot] was asked for last; 1 where the drafter does not say. */
    val confidence: Float get() = arena[confidenceAt].floats.get(0)

    /** The pass over all slots; [count] of them get logits. [anchor], at [start], is the last token so far. */
    fun run(anchor: Int, start: Int, count: Int, caches: Map<String, Tensor>) {
        arena[idsAt].longs.put(0, anchor.toLong())
        for (slot in 0 until size) arena[positionsAt].longs.put(slot, (start + slot).toLong())
        arena[rowsAt].beginning(count.toLong()).use { rows ->
            arena[hiddenAt].beginning(count.toLong(), model.hiddenSize.toLong()).use { hidden ->
                arena[baseLogitsAt].beginning(count.toLong(), model.vocabSize.toLong()).use { baseLogits ->
                    val inputs = mapOf("input_ids" to arena[idsAt], "position_ids" to arena[positionsAt], "logit_rows" to rows)
                    bind(PartRole.DRAFTER_BLOCK, inputs + caches, mapOf("slot_hidden" to hidden, "base_logits" to baseLogits)).run()
                }
            }
        }
    }

    /** Logits [V] of a slot after the token before it; valid until the next. */
    fun slot(slot: Int, before: Int): FloatArray {
        arena[tokenAt].longs.put(0, before.toLong())
        chain.getOrPut(slot) { bindSlot(slot) }.run()
        arena[logitsAt].floats.duplicate().position(0).get(logits)
        return logits
    }

    private fun bindSlot(slot: Int): Binding {
        val inputs = mapOf("token_id" to arena[tokenAt], "base_logits" to row(baseLogitsAt, slot), "slot_hidden" to row(hiddenAt, slot))
        val confidence = if (record.hasConfidence) mapOf("confidence" to arena[confidenceAt]) else emptyMap()
        return bind(PartRole.DRAFTER_MARKOV, inputs, confidence + ("logits" to arena[logitsAt]))
    }

    private fun row(number: Int, slot: Int): Tensor {
        val values = arena[number].shape[1]
        val length = (values * Float.SIZE_BYTES).toInt()
        val bytes = arena[number].bytes.duplicate().limit((slot + 1) * length).position(slot * length).slice().order(ByteOrder.nativeOrder())
        return Tensor(FLOAT, longArrayOf(1, values), bytes).also(rowTensors::add)
    }

    override fun close() {
        chain.clear()
        rowTensors.forEach(Tensor::close)
        arena.close()
    }
}
