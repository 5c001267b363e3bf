package dev.lesonnx

import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable

/** The ways in which pictures come in that this library knows. */
@Serializable
enum class VisionKind {
    @SerialName("minicpmv")
    MINICPMV,
}

/** Token ids by which positions are given: image tokens, and the marks around pictures, slices and their rows. */
@Serializable
data class VisionTokens(
    val image: Int,
    @SerialName("image_start") val imageStart: Int,
    @SerialName("image_end") val imageEnd: Int,
    @SerialName("slice_start") val sliceStart: Int,
    @SerialName("slice_end") val sliceEnd: Int,
    val newline: Int,
)

/**
 * The text that stands for pictures in a prompt.
 *
 * A prompt has one [placeholder] a picture, which `vision.Placeholders` expands. [idStart] and [idEnd] stand around a picture's number,
 * both null where it has none. [separator] comes between a picture and what follows it in a message of a chat; null where there is none.
 */
@Serializable
data class VisionTexts(
    val placeholder: String,
    @SerialName("image_start") val imageStart: String,
    @SerialName("image_end") val imageEnd: String,
    @SerialName("slice_start") val sliceStart: String,
    @SerialName("slice_end") val sliceEnd: String,
    @SerialName("row_end") val rowEnd: String,
    @SerialName("id_start") val idStart: String? = null,
    @SerialName("id_end") val idEnd: String? = null,
    val separator: String? = null,
)

/**
 * How pictures come in: what prepares and reads them, and how they are cut, marked and placed; see `docs/bundle.md`. Immutable, safe to
 * share.
 *
 * A picture is seen whole, as its overview, and in up to [maxSliceNums] slices of about [scaleResolution] squared pixels (1: none).
 * [tokenPatches] patches a side, each of [patchSize] pixels a side, give one image token. [workingBytes] is what the tower takes for the
 * largest crop, beside the weights in [data].
 */
@Serializable
data class VisionRecord(
    val kind: VisionKind,
    val parts: List<Part>,
    val data: String,
    @SerialName("patch_size") val patchSize: Int,
    @SerialName("token_patches") val tokenPatches: Int,
    @SerialName("scale_resolution") val scaleResolution: Int,
    @SerialName("max_slice_nums") val maxSliceNums: Int,
    val tokens: VisionTokens,
    val texts: VisionTexts,
    @SerialName("num_parameters") val numParameters: Long,
    @SerialName("working_bytes") val workingBytes: Long,
) {
    /** The part of a role; NoSuchElementException where there is none. */
    fun part(role: PartRole): Part = parts.first { it.role == role }

    /** The pixels along a side of what becomes one image token. */
    internal val tokenPixels: Int get() = tokenPatches * patchSize
}
