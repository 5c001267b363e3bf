package dev.lesonnx

import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.int
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import kotlinx.serialization.json.jsonPrimitive
import java.io.ByteArrayOutputStream
import java.nio.ByteBuffer
import java.nio.charset.CharacterCodingException
import java.nio.charset.CodingErrorAction

/**
 * A `decoder` of `tokenizer.json`: tokens in, pieces of text out, as the tokenizers library has it (its `decoders` module
 * names what each does). Immutable, safe to share between threads.
 */
internal fun interface TokenDecoder {
    fun decode(tokens: List<String>): List<String>

    companion object {
        private const val REPLACEMENT = "\ufffd"
        private val BYTE_TOKEN = Regex("<0x([0-9A-Fa-f]{2})>")

        /** The decoder that a file describes, null for none; IllegalArgumentException for one that is not known here. */
        fun of(description: JsonElement?): TokenDecoder? = description.step()?.let(::of)

        private fun of(description: JsonObject): TokenDecoder = when (val type = description.type) {
            "ByteLevel" -> TokenDecoder(::byteLevel)
            "ByteFallback" -> TokenDecoder(::byteFallback)
            "Fuse" -> TokenDecoder { listOf(it.joinToString("")) }
            "Replace" -> {
                val replacement = Replacement(description)
                TokenDecoder { tokens -> tokens.map(replacement::apply) }
            }
            "Strip" -> {
                val (start, stop) = listOf("start", "stop").map { description.getValue(it).jsonPrimitive.int }
                val content = description.text("content")
                TokenDecoder { tokens -> tokens.map { strip(it, content, start, stop) } }
            }
            "Metaspace" -> metaspace(Metaspace(description))
            "Sequence" -> {
                val steps = description.getValue("decoders").jsonArray.map { of(it.jsonObject) }
                TokenDecoder { tokens -> steps.fold(tokens) { pieces, step -> step.decode(pieces) } }
            }
            else -> throw IllegalArgumentException("decoder '$type' is not known")
        }

        /** GPT-2's: every byte has a character; a token with any other character stands for itself. */
        private fun byteLevel(tokens: List<String>): List<String> {
            val bytes = ByteArrayOutputStream()
            for (token in tokens) {
                if (token.all { ByteCharacters.byteOf(it) >= 0 }) {
                    token.forEach { bytes.write(ByteCharacters.byteOf(it)) }
                } else {
                    bytes.write(token.toByteArray(Charsets.UTF_8))
                }
            }
            return listOf(lossyText(bytes.toByteArray()))
        }

        private fun byteFallback(tokens: List<String>): List<String> {
            val pieces = ArrayList<String>()
            val bytes = ByteArrayOutputStream()
            fun flush() {
                if (bytes.size() == 0) return
                // A run of bytes is text as a whole or not at all.
                pieces += strictText(bytes.toByteArray()) ?: REPLACEMENT.repeat(bytes.size())
                bytes.reset()
            }
            for (token in tokens) {
                val byte = BYTE_TOKEN.matchEntire(token)
                if (byte != null) {
                    bytes.write(byte.groupValues[1].toInt(16))
                } else {
                    flush()
                    pieces += token
                }
            }
            flush()
            return pieces
        }

        private fun strip(token: String, content: String, start: Int, stop: Int): String {
            var text = token
            repeat(start) { text = text.removePrefix(content) }
            repeat(stop) { text = text.removeSuffix(content) }
            return text
        }

        /** The mark of a word's beginning is a space, but at the very beginning, where encoding has added it. */
        private fun metaspace(marks: Metaspace) = TokenDecoder { tokens ->
            tokens.mapIndexed { place, token -> token.replace(marks.mark, if (place == 0 && marks.isPrepended) "" else " ") }
        }

        private fun lossyText(bytes: ByteArray): String = Charsets.UTF_8.newDecoder()
            .onMalformedInput(CodingErrorAction.REPLACE)
            .onUnmappableCharacter(CodingErrorAction.REPLACE)
            .decode(ByteBuffer.wrap(bytes)).toString()

        private fun strictText(bytes: ByteArray): String? = try {
            Charsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(bytes)).toString()
        } catch (_: CharacterCodingException) {
            null
        }
    }
}
