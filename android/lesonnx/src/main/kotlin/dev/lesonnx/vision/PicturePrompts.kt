package dev.lesonnx.vision

import dev.lesonnx.InputError
import dev.lesonnx.Prompt
import dev.lesonnx.PromptPicture
import dev.lesonnx.VisionRecord

/**
 * Makes prompts of texts or token ids with pictures: placeholders become image tokens and marks, tokens get their positions.
 *
 * It looks at sizes of pictures only. [encode] turns a text into token ids. Thread-safe if that is.
 */
internal class PicturePrompts(private val vision: VisionRecord, private val encode: (text: String, addSpecialTokens: Boolean) -> IntArray) {
    private val cutting = Cutting(vision)
    private val placeholders = Placeholders(vision)
    private val canvas = Canvas(vision)

    /** A text with one placeholder a picture, in order; [InputError] for any other number. */
    fun ofText(text: String, pictures: List<Picture>, addSpecialTokens: Boolean): Prompt {
        val views = pictures.map(::viewsOf)
        return prompt(encode(placeholders.expand(text, views), addSpecialTokens), pictures, views)
    }

    /** Token ids with one image token a picture, in order, which becomes all of that picture's; [InputError] for any other number. */
    fun ofIds(tokenIds: IntArray, pictures: List<Picture>): Prompt {
        val image = vision.tokens.image
        val found = tokenIds.count { it == image }
        if (found != pictures.size) throw InputError("the prompt's ids hold the image token $image $found times, expected once a picture: ${pictures.size}")
        val views = pictures.map(::viewsOf)
        var number = 0
        val expanded = tokenIds.flatMap { token ->
            if (token == image) encode(placeholders.marks(number, views[number++]), false).asList() else listOf(token)
        }
        return prompt(expanded.toIntArray(), pictures, views)
    }

    /** A text with the placeholders of so many pictures in front, each followed by the separator, where it has none of its own. */
    fun withPlaceholders(text: String, numPictures: Int): String =
        if (vision.texts.placeholder in text) text else inFront(text, numPictures, vision.texts.separator ?: SEPARATOR)

    /** What a message of a chat holds that has so many pictures before its text; [InputError] where the bundle's chats have none. */
    fun content(text: String, numPictures: Int): String = inFront(
        text,
        numPictures,
        vision.texts.separator ?: throw InputError("the bundle's chat format has no place for pictures; use generate, which completes a text"),
    )

    private fun inFront(text: String, numPictures: Int, separator: String) = (vision.texts.placeholder + separator).repeat(numPictures) + text

    private fun viewsOf(picture: Picture): List<View> = cutting.views(picture.height, picture.width)

    private fun prompt(tokenIds: IntArray, pictures: List<Picture>, views: List<List<View>>): Prompt {
        // Image tokens without pictures are ordinary tokens: a model may have generated them.
        if (pictures.isEmpty()) return Prompt(tokenIds)
        val placed = canvas.place(tokenIds, views)
        return Prompt(tokenIds, placed.positions, pictures.indices.map { PromptPicture(pictures[it], views[it], placed.imagePlaces[it]) })
    }

    private companion object {
        /** Where a bundle's chat template does not say what parts a picture from the text behind it. */
        const val SEPARATOR = "\n"
    }
}
