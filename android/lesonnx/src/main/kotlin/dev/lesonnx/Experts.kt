package dev.lesonnx

import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable

/** What stands between the gate and up projections and the down projection of an expert; see [ExpertKind]. */
@Serializable
enum class Activation {
    @SerialName("swiglu")
    SWIGLU,

    @SerialName("geglu")
    GEGLU,

    @SerialName("reglu")
    REGLU,

    @SerialName("swiglu_clamped")
    SWIGLU_CLAMPED,
}

/**
 * One linear map of an expert, `y = x W^T (+ bias)`, with W of shape [[rows], [columns]] (out, in).
 *
 * Quantized ([bits] 2, 4, 8): the weight is uint8 [rows, ceil(columns / block_size), block_size * bits / 8], low bits first,
 * zero point `2 ** (bits - 1)`; scales float32 [rows, blocks]. Float (bits 32): row-major float32, [blockSize] 0, no scales.
 * A bias is float32 [rows]. Offsets count from the start of the expert.
 */
@Serializable
data class ExpertMatrix(
    val rows: Long,
    val columns: Long,
    val bits: Int,
    @SerialName("block_size") val blockSize: Int,
    @SerialName("weight_offset_bytes") val weightOffsetBytes: Long,
    @SerialName("scales_offset_bytes") val scalesOffsetBytes: Long? = null,
    @SerialName("bias_offset_bytes") val biasOffsetBytes: Long? = null,
) {
    /** Quantization blocks along a row, the last one padded; 0 for a float matrix. */
    val numBlocks: Long get() = if (blockSize > 0) (columns + blockSize - 1) / blockSize else 0

    val weightBytes: Long
        get() = if (bits == 32) rows * columns * 4 else rows * numBlocks * blockSize * bits / 8

    val scalesBytes: Long get() = rows * numBlocks * 4
}

/**
 * Experts that share shape, bits and activation, so that one stage computes any of them.
 *
 * With g and u the gate and up projections of x, an expert gives `down(act(g) * u)`: act is SiLU for `swiglu`, GELU (tanh
 * form) for `geglu`, ReLU for `reglu`. `swiglu_clamped` is `(u' + 1) * g' * sigmoid(alpha * g')` with g' = min(g, limit) and
 * u' = clamp(u, -limit, limit).
 */
@Serializable
data class ExpertKind(
    val name: String,
    @SerialName("hidden_size") val hiddenSize: Long,
    @SerialName("intermediate_size") val intermediateSize: Long,
    val activation: Activation,
    val alpha: Double = 1.702,
    val limit: Double = 7.0,
    @SerialName("gate_proj") val gateProj: ExpertMatrix,
    @SerialName("up_proj") val upProj: ExpertMatrix,
    @SerialName("down_proj") val downProj: ExpertMatrix,
    @SerialName("length_bytes") val lengthBytes: Long,
    val stage: String? = null,
) {
    /** By their names in checkpoints. */
    val matrices: Map<String, ExpertMatrix>
        get() = mapOf("gate_proj" to gateProj, "up_proj" to upProj, "down_proj" to downProj)

    /** What one expert of this kind costs in the cache and on flash: its length in whole pages. */
    val costBytes: Long get() = pageCeil(lengthBytes)
}

/** The experts of one MoE layer: expert e lies at `e * stride` of the pack, a shared expert after the last. */
@Serializable
data class ExpertLayer(
    @SerialName("layer_idx") val layerIdx: Int,
    val pack: String,
    @SerialName("num_experts") val numExperts: Int,
    @SerialName("num_experts_per_tok") val numExpertsPerTok: Int,
    val kind: Int,
    @SerialName("shared_kind") val sharedKind: Int? = null,
)

/** The length rounded up to whole pages. */
internal fun pageCeil(lengthBytes: Long): Long = (lengthBytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES
