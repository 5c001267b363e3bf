package dev.lesonnx.vision

import dev.lesonnx.InputError
import dev.lesonnx.VisionRecord

/** What stands for pictures in a prompt's text. Pure; the twin of `lesonnx/vision/placeholders.py`. Immutable. */
internal class Placeholders(private val vision: VisionRecord) {
    private val texts = vision.texts

    /** [text], whose placeholders become those of [pictures], each given by its views; [InputError] where their numbers differ. */
    fun expand(text: String, pictures: List<List<View>>): String {
        val pieces = text.split(texts.placeholder)
        if (pieces.size - 1 != pictures.size) {
            val found = counted(pieces.size - 1, "placeholder")
            throw InputError("the prompt has $found '${texts.placeholder}' for ${counted(pictures.size, "picture")}, expected one a picture")
        }
        val expanded = StringBuilder(pieces[0])
        for ((number, views) in pictures.withIndex()) expanded.append(marks(number, views)).append(pieces[number + 1])
        return expanded.toString()
    }

    /** What stands for picture [number] of a prompt. */
    fun marks(number: Int, views: List<View>): String = buildString {
        if (texts.idStart != null) append(texts.idStart).append(number).append(texts.idEnd)
        append(texts.imageStart).append(crop(views[0])).append(texts.imageEnd)
        for (slices in views.drop(1)) {
            val slice = texts.sliceStart + crop(slices) + texts.sliceEnd
            append(List(slices.rows) { slice.repeat(slices.columns) }.joinToString(texts.rowEnd))
        }
    }

    private fun counted(count: Int, what: String) = if (count == 1) "1 $what" else "$count ${what}s"

    private fun crop(view: View): String = texts.placeholder.repeat(view.cropTokens(vision))
}
