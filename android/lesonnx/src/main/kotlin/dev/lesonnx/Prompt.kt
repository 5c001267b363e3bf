package dev.lesonnx

import dev.lesonnx.vision.Picture
import dev.lesonnx.vision.View
import java.nio.FloatBuffer

/** A picture of a prompt: how it is looked at, and the places of its image tokens, in the order of its features. */
internal class PromptPicture(val picture: Picture, val views: List<View>, val places: IntArray)

/**
 * What a sequence is to begin with: token ids, and where pictures are in it. Immutable.
 *
 * [positions]: of each token, in each row; null where they count up, as without pictures. [features]: [I,H] of pictures that were seen,
 * which are those that are yet to run.
 */
internal class Prompt(
    val tokenIds: IntArray,
    private val positions: Array<IntArray>? = null,
    val pictures: List<PromptPicture> = emptyList(),
    private val features: Map<PromptPicture, FloatArray> = emptyMap(),
) {
    private val pictureAt = arrayOfNulls<PromptPicture>(if (pictures.isEmpty()) 0 else tokenIds.size)

    init {
        for (picture in pictures) for (place in picture.places) pictureAt[place] = picture
    }

    val size: Int get() = tokenIds.size

    /** Image tokens of all pictures. */
    val numImageTokens: Int get() = pictures.sumOf { it.places.size }

    fun position(row: Int, place: Int): Int = positions?.get(row)?.get(place) ?: place

    /** The key of the picture that a token is of; null for text. */
    fun keyAt(place: Int): String? = pictureAt.getOrNull(place)?.picture?.key

    /** The pictures of which an image token comes after the first [numTokens]. */
    fun picturesAfter(numTokens: Int): List<PromptPicture> = pictures.filter { it.places.last() >= numTokens }

    /** The same prompt with what was seen. */
    fun seen(features: Map<PromptPicture, FloatArray>): Prompt = Prompt(tokenIds, positions, pictures, features)

    /** Puts features in the place of the embeddings [T,H] of image tokens, in a step of tokens [first] to before [end] of the prompt. */
    fun copyFeatures(first: Int, end: Int, hidden: FloatBuffer) {
        val size = hidden.capacity() / (end - first)
        for (picture in pictures) {
            for ((row, place) in picture.places.withIndex()) {
                if (place !in first until end) continue
                hidden.duplicate().position((place - first) * size).put(features.getValue(picture), row * size, size)
            }
        }
    }
}
