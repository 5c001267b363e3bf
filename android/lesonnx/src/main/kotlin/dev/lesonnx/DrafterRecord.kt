package dev.lesonnx

import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable

/** The kinds of drafters that a bundle can hold. */
@Serializable
enum class DrafterKind {
    @SerialName("dspark")
    DSPARK,
}

/**
 * A block drafter trained for the model, and its parts; see `docs/bundle.md`. Immutable, safe to share.
 *
 * [targetLayerIds]: the layers whose outputs it reads, in their order; -1 is the embedding's. A slot of the block is one drafted
 * token. Its caches are the outputs of the context part, which the block part takes for all tokens.
 */
@Serializable
data class DrafterRecord(
    val kind: DrafterKind,
    @SerialName("block_size") val blockSize: Int,
    @SerialName("mask_token_id") val maskTokenId: Int,
    @SerialName("target_layer_ids") val targetLayerIds: List<Int>,
    @SerialName("markov_rank") val markovRank: Int,
    @SerialName("num_parameters") val numParameters: Long,
    val parts: List<Part>,
) {
    /** The part of a role; NoSuchElementException where there is none. */
    fun part(role: PartRole): Part = parts.first { it.role == role }

    /** The float32 values that a token has in each cache, by its name. */
    internal val cacheSizes: Map<String, Long>
        get() = part(PartRole.DRAFTER_CONTEXT).outputs.associate { it.name to (it.shape.last() as Dimension.Fixed).size }

    /** Whether the Markov part says how likely its slot is accepted. */
    val hasConfidence: Boolean get() = part(PartRole.DRAFTER_MARKOV).outputs.any { it.name == "confidence" }
}
