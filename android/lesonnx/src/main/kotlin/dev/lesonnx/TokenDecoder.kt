package dev.lesonnx

import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonNull
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.boolean
import kotlinx.serialization.json.int
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import kotlinx.serialization.json.jsonPrimitive
import java.io.ByteArrayOutputStream
import java.nio.ByteBuffer
import java.nio.charset.CharacterCodingException
import java.nio.charset.CodingErrorAction
import java.nio.file.Path

/**
 * A `decoder` of `tokenizer.json`: tokens in, pieces of text out, as the tokenizers library has it (its `decoders` module
 * names what each does). Immutable, safe to share between threads.
 */
internal fun interface TokenDecoder {
    fun decode(tokens: List<String>): List<String>

    companion object {
        private const val REPLACEMENT = "\ufffd"
        private val BYTE_TOKEN = Regex("<0x([0-9A-Fa-f]{2})>")

        /** The decoder that the file describes, null for none; [BundleError] for one that is not known here. */
        fun of(description: JsonElement?, path: Path): TokenDecoder? =
            if (description == null || description is JsonNull) null else of(description.jsonObject, path)

        private fun of(description: JsonObject, path: Path): TokenDecoder {
            fun text(key: String) = description.getValue(key).jsonPrimitive.content
            return when (val type = text("type")) {
                "ByteLevel" -> TokenDecoder(::byteLevel)
                "ByteFallback" -> TokenDecoder(::byteFallback)
                "Fuse" -> TokenDecoder { listOf(it.joinToString("")) }
                "Replace" -> replace(description.getValue("pattern").jsonObject, text("content"))
                "Strip" -> {
                    val (start, stop) = listOf("start", "stop").map { description.getValue(it).jsonPrimitive.int }
                    TokenDecoder { tokens -> tokens.map { strip(it, text("content"), start, stop) } }
                }
                "Metaspace" -> metaspace(description, text("replacement"))
                "Sequence" -> {
                    val steps = description.getValue("decoders").jsonArray.map { of(it.jsonObject, path) }
                    TokenDecoder { tokens -> steps.fold(tokens) { pieces, step -> step.decode(pieces) } }
                }
                else -> throw BundleError("$path: decoder '$type' is not one that this lesonnx knows")
            }
        }

        /** GPT-2's: every byte has a character; a token with any other character stands for itself. */
        private fun byteLevel(tokens: List<String>): List<String> {
            val bytes = ByteArrayOutputStream()
            for (token in tokens) {
                if (token.all { it.code < BYTES_BY_CHARACTER.size && BYTES_BY_CHARACTER[it.code] >= 0 }) {
                    token.forEach { bytes.write(BYTES_BY_CHARACTER[it.code]) }
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

        private fun replace(pattern: JsonObject, content: String): TokenDecoder {
            val regex = pattern["Regex"]?.jsonPrimitive?.content?.let(::Regex)
                ?: Regex.fromLiteral(pattern.getValue("String").jsonPrimitive.content)
            return TokenDecoder { tokens -> tokens.map { token -> regex.replace(token) { content } } }
        }

        private fun strip(token: String, content: String, start: Int, stop: Int): String {
            var text = token
            repeat(start) { text = text.removePrefix(content) }
            repeat(stop) { text = text.removeSuffix(content) }
            return text
        }

        /** The mark of a word's beginning is a space, but at the very beginning, where encoding has added it. */
        private fun metaspace(description: JsonObject, mark: String): TokenDecoder {
            val isPrefixed = description["prepend_scheme"]?.jsonPrimitive?.content?.let { it != "never" }
                ?: description["add_prefix_space"]?.jsonPrimitive?.boolean
                ?: true
            return TokenDecoder { tokens ->
                tokens.mapIndexed { place, token -> token.replace(mark, if (place == 0 && isPrefixed) "" else " ") }
            }
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

        /** GPT-2's `bytes_to_unicode`, the other way round: printable bytes stand for themselves, the others follow from 256 on. */
        private val BYTES_BY_CHARACTER: IntArray = IntArray(512) { -1 }.also { table ->
            val printable = ('!'.code..'~'.code) + (0xA1..0xAC) + (0xAE..0xFF)
            printable.forEach { table[it] = it }
            (0..255).minus(printable.toSet()).forEachIndexed { place, byte -> table[256 + place] = byte }
        }
    }
}
