package dev.lesonnx

import kotlinx.serialization.json.JsonArray
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.int
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonPrimitive
import java.nio.file.Path

/**
 * The tokens of a Hugging Face `tokenizer.json` and how they become text. Immutable, safe to share between threads. It does not
 * encode.
 */
class TokenTable internal constructor(file: TokenizerFile) {
    private val names: Array<String?>
    private val special: Set<Int> = file.addedTokens.filter { it.special }.mapTo(HashSet()) { it.id }
    private val decoder = TokenDecoder.of(file.decoder)
    private val ids: Map<String, Int>

    init {
        val tokens = HashMap<Int, String>()
        when (val vocab = file.model.vocab) {
            is JsonObject -> vocab.forEach { (token, id) -> tokens[id.jsonPrimitive.int] = token }
            is JsonArray -> vocab.forEachIndexed { id, entry -> tokens[id] = entry.jsonArray[0].jsonPrimitive.content }
            else -> throw IllegalArgumentException("model.vocab is neither an object nor a list")
        }
        file.addedTokens.forEach { tokens[it.id] = it.content }
        val last = tokens.keys.maxOrNull() ?: -1
        require(last < MAX_TOKENS && tokens.keys.none { it < 0 }) { "a token has an id outside 0..${MAX_TOKENS - 1}" }
        names = arrayOfNulls(last + 1)
        tokens.forEach { (id, token) -> names[id] = token }
        ids = HashMap<String, Int>(2 * tokens.size).also { map -> tokens.forEach { (id, token) -> map[token] = id } }
    }

    fun id(token: String): Int? = ids[token]

    fun name(token: Int): String? = names.getOrNull(token)

    /** Whether decoding skips this token: special, or beyond the vocabulary. */
    fun isSilent(token: Int): Boolean = token in special || name(token) == null

    /** The text of token ids, as [Tokenizer.decode] has it. */
    fun decode(tokens: IntArray, skipSpecialTokens: Boolean): String {
        val pieces = tokens.filterNot { skipSpecialTokens && it in special }.mapNotNull(::name)
        return decoder?.decode(pieces)?.joinToString("") ?: pieces.joinToString(" ")
    }

    companion object {
        /** No vocabulary has more; what names a larger id would only exhaust the memory. */
        private const val MAX_TOKENS = 1 shl 24

        /** Reads a `tokenizer.json`; [BundleError] where it is missing or broken, or decodes in a way that is not known here. */
        fun read(path: Path): TokenTable = TokenizerFile.read(path, ::TokenTable)
    }
}
