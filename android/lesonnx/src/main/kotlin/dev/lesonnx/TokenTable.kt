package dev.lesonnx

import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable
import kotlinx.serialization.SerializationException
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonArray
import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.int
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonPrimitive
import java.io.IOException
import java.nio.file.Files
import java.nio.file.Path

/**
 * The tokens of a Hugging Face `tokenizer.json` and how they become text. Immutable, safe to share between threads.
 *
 * It does not encode: that needs the whole of the file, and a library that knows it.
 */
class TokenTable private constructor(
    private val names: Array<String?>,
    private val special: Set<Int>,
    private val decoder: TokenDecoder?,
) {
    private val ids: Map<String, Int> by lazy { names.indices.mapNotNull { id -> names[id]?.let { it to id } }.toMap() }

    fun id(token: String): Int? = ids[token]

    fun name(token: Int): String? = names.getOrNull(token)

    /** Whether decoding skips this token: special, or beyond the vocabulary. */
    fun isSilent(token: Int): Boolean = token in special || name(token) == null

    /** The text of token ids, as [Tokenizer.decode] has it. */
    fun decode(tokens: IntArray, skipSpecialTokens: Boolean): String {
        val pieces = tokens.filterNot { skipSpecialTokens && it in special }.mapNotNull(::name)
        return decoder?.decode(pieces)?.joinToString("") ?: pieces.joinToString(" ")
    }

    @Serializable
    private class Document(
        val model: Model,
        @SerialName("added_tokens") val addedTokens: List<AddedToken> = emptyList(),
        val decoder: JsonElement? = null,
    )

    /** `vocab` is an object of ids by token, or a list of tokens with their scores. */
    @Serializable
    private class Model(val vocab: JsonElement)

    @Serializable
    private class AddedToken(val id: Int, val content: String, val special: Boolean = false)

    companion object {
        /** No vocabulary has more; what names a larger id would only exhaust the memory. */
        private const val MAX_TOKENS = 1 shl 24

        // Merges make up most of the file, and are not needed.
        private val json = Json { ignoreUnknownKeys = true }

        /** Reads a `tokenizer.json`; [BundleError] where it is missing or broken, or decodes in a way that is not known here. */
        fun read(path: Path): TokenTable {
            val text = try {
                String(Files.readAllBytes(path), Charsets.UTF_8)
            } catch (error: IOException) {
                throw BundleError("$path: cannot be read: ${oneLine(error)}", error)
            }
            try {
                return make(json.decodeFromString<Document>(text), path)
            } catch (error: SerializationException) {
                throw BundleError("$path: not a tokenizer.json: ${oneLine(error)}", error)
            } catch (error: IllegalArgumentException) {
                throw BundleError("$path: not a tokenizer.json: ${oneLine(error)}", error)
            }
        }

        private fun make(document: Document, path: Path): TokenTable {
            val tokens = HashMap<Int, String>()
            when (val vocab = document.model.vocab) {
                is JsonObject -> vocab.forEach { (token, id) -> tokens[id.jsonPrimitive.int] = token }
                is JsonArray -> vocab.forEachIndexed { id, entry -> tokens[id] = entry.jsonArray[0].jsonPrimitive.content }
                else -> throw BundleError("$path: model.vocab is neither an object nor a list")
            }
            document.addedTokens.forEach { tokens[it.id] = it.content }
            val last = tokens.keys.maxOrNull() ?: -1
            if (tokens.keys.any { it < 0 } || last >= MAX_TOKENS) throw BundleError("$path: a token has an id outside 0..${MAX_TOKENS - 1}")
            val names = arrayOfNulls<String>(last + 1)
            tokens.forEach { (id, token) -> names[id] = token }
            val special = document.addedTokens.filter { it.special }.mapTo(HashSet()) { it.id }
            return TokenTable(names, special, TokenDecoder.of(document.decoder, path))
        }
    }
}
