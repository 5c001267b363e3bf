package dev.lesonnx

import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import java.nio.IntBuffer
import java.nio.LongBuffer

/** ONNX Runtime reads tensors fastest from here on. */
private const val TENSOR_ALIGNMENT_BYTES = 64L

/** The type as ONNX Runtime's Java names it. */
internal val Dtype.onnx: OnnxJavaType
    get() = when (this) {
        Dtype.FLOAT32 -> OnnxJavaType.FLOAT
        Dtype.FLOAT16 -> OnnxJavaType.FLOAT16
        Dtype.INT64 -> OnnxJavaType.INT64
        Dtype.INT32 -> OnnxJavaType.INT32
        Dtype.BOOL -> OnnxJavaType.BOOL
        Dtype.UINT8 -> OnnxJavaType.UINT8
        Dtype.INT8 -> OnnxJavaType.INT8
    }

/** A tensor over memory that somebody else owns: [bytes], read and written in place. Owns only ONNX Runtime's handle. */
internal class Tensor(val type: OnnxJavaType, val shape: LongArray, val bytes: ByteBuffer) : AutoCloseable {
    val onnx: OnnxTensor = OrtEnvironment.getEnvironment().let { environment ->
        when (type) {
            OnnxJavaType.FLOAT -> OnnxTensor.createTensor(environment, bytes.asFloatBuffer(), shape)
            OnnxJavaType.FLOAT16 -> OnnxTensor.createTensor(environment, bytes.asShortBuffer(), shape, type)
            OnnxJavaType.INT64 -> OnnxTensor.createTensor(environment, bytes.asLongBuffer(), shape)
            OnnxJavaType.INT32 -> OnnxTensor.createTensor(environment, bytes.asIntBuffer(), shape)
            OnnxJavaType.BOOL, OnnxJavaType.UINT8, OnnxJavaType.INT8 -> OnnxTensor.createTensor(environment, bytes, shape, type)
            else -> throw IllegalArgumentException("no part takes tensors of type $type")
        }
    }
    val floats: FloatBuffer = bytes.asFloatBuffer()
    val longs: LongBuffer = bytes.asLongBuffer()
    val ints: IntBuffer = bytes.asIntBuffer()

    /** The same memory under another shape; the caller closes it. */
    fun withShape(vararg other: Long): Tensor = Tensor(type, other, bytes)

    /** The beginning of the same memory under a shape that takes no more of it; the caller closes it. */
    fun beginning(vararg other: Long): Tensor {
        val length = bytesOf(type, other).toInt()
        return Tensor(type, other, bytes.duplicate().position(0).limit(length).slice().order(ByteOrder.nativeOrder()))
    }

    override fun close(): Unit = onnx.close()

    companion object {
        /** Bytes of a tensor of this type and shape. */
        fun bytesOf(type: OnnxJavaType, shape: LongArray): Long = shape.fold(type.size.toLong()) { product, size -> Math.multiplyExact(product, size) }
    }
}

/**
 * Tensors that live and die together, in one piece of memory. Close it to free them all.
 *
 * Ask for every tensor first, then [allocate]; not thread-safe.
 */
internal class TensorArena(private val platform: Platform) : AutoCloseable {
    private var memory: NativeMemory? = null
    private val tensors = ArrayList<Tensor>()
    private val planned = ArrayList<Plan>()

    private class Plan(val type: OnnxJavaType, val shape: LongArray, val offset: Long, val numBytes: Long)

    /** Plans a tensor; gives its number. */
    fun plan(type: OnnxJavaType, vararg shape: Long): Int {
        val offset = planned.lastOrNull()?.let { aligned(it.offset + it.numBytes) } ?: 0L
        planned += Plan(type, shape, offset, Tensor.bytesOf(type, shape))
        return planned.size - 1
    }

    /** Allocates what was planned, zeroed. */
    fun allocate(): TensorArena {
        val last = planned.last()
        val whole = platform.allocate(last.offset + last.numBytes).also { memory = it }.buffer
        for (plan in planned) {
            val end = (plan.offset + plan.numBytes).toInt()
            val bytes = whole.duplicate().position(plan.offset.toInt()).limit(end).slice().order(ByteOrder.nativeOrder())
            tensors += Tensor(plan.type, plan.shape, bytes)
        }
        return this
    }

    operator fun get(number: Int): Tensor = tensors[number]

    override fun close() {
        tensors.forEach(Tensor::close)
        tensors.clear()
        memory?.close()
        memory = null
    }

    private fun aligned(offset: Long): Long = (offset + TENSOR_ALIGNMENT_BYTES - 1) / TENSOR_ALIGNMENT_BYTES * TENSOR_ALIGNMENT_BYTES
}
