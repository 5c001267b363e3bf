package dev.lesonnx

import kotlinx.serialization.KSerializer
import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable
import kotlinx.serialization.SerializationException
import kotlinx.serialization.descriptors.PrimitiveKind
import kotlinx.serialization.descriptors.PrimitiveSerialDescriptor
import kotlinx.serialization.encoding.Decoder
import kotlinx.serialization.encoding.Encoder
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonArray
import kotlinx.serialization.json.JsonDecoder
import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonNull
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.JsonPrimitive
import kotlinx.serialization.json.boolean
import kotlinx.serialization.json.jsonPrimitive
import java.nio.file.Path

/** What a Hugging Face `tokenizer.json` says, as far as this library uses it. */
@Serializable
internal class TokenizerFile(
    val model: Model,
    @SerialName("added_tokens") val addedTokens: List<AddedToken> = emptyList(),
    val normalizer: JsonElement? = null,
    @SerialName("pre_tokenizer") val preTokenizer: JsonElement? = null,
    @SerialName("post_processor") val postProcessor: JsonElement? = null,
    val decoder: JsonElement? = null,
) {
    /** [vocab] is an object of ids by token, or a list of tokens with their scores. */
    @Serializable
    class Model(
        val type: String = "BPE",
        val vocab: JsonElement,
        val merges: List<Merge> = emptyList(),
        val dropout: Double? = null,
        @SerialName("unk_token") val unknownToken: String? = null,
        @SerialName("continuing_subword_prefix") val continuingSubwordPrefix: String? = null,
        @SerialName("end_of_word_suffix") val endOfWordSuffix: String? = null,
        @SerialName("fuse_unk") val fusesUnknown: Boolean = false,
        @SerialName("byte_fallback") val byteFallback: Boolean = false,
        @SerialName("ignore_merges") val ignoresMerges: Boolean = false,
    )

    /** Two tokens that become one; written as a list of them, or as a text with a space between. */
    @Serializable(with = MergeSerializer::class)
    class Merge(val first: String, val second: String)

    /** A token that is found in the text before anything else happens to it. */
    @Serializable
    class AddedToken(
        val id: Int,
        val content: String,
        val special: Boolean = false,
        val normalized: Boolean = false,
        val lstrip: Boolean = false,
        val rstrip: Boolean = false,
        @SerialName("single_word") val singleWord: Boolean = false,
    )

    internal object MergeSerializer : KSerializer<Merge> {
        override val descriptor = PrimitiveSerialDescriptor("dev.lesonnx.Merge", PrimitiveKind.STRING)

        override fun deserialize(decoder: Decoder): Merge {
            val element = (decoder as JsonDecoder).decodeJsonElement()
            val pieces = when (element) {
                is JsonArray -> element.map { it.jsonPrimitive.content }
                is JsonPrimitive -> element.content.split(' ', limit = 2)
                else -> emptyList()
            }
            if (pieces.size != 2) throw SerializationException("merge $element is not of two tokens")
            return Merge(pieces[0], pieces[1])
        }

        override fun serialize(encoder: Encoder, value: Merge) = encoder.encodeString("${value.first} ${value.second}")
    }

    companion object {
        private val json = Json { ignoreUnknownKeys = true }

        /** Reads the file and makes [make] of it; [BundleError] in one line where either fails. */
        fun <T> read(path: Path, make: (TokenizerFile) -> T): T = try {
            make(json.decodeFromString<TokenizerFile>(readText(path)))
        } catch (error: IllegalArgumentException) { // what kotlinx.serialization throws is one as well
            throw BundleError("$path: not a tokenizer.json that this lesonnx reads: ${oneLine(error)}", error)
        } catch (error: NoSuchElementException) {
            throw BundleError("$path: not a tokenizer.json that this lesonnx reads: ${oneLine(error)}", error)
        }
    }
}

/** Null for a step that is not there. */
internal fun JsonElement?.step(): JsonObject? = if (this == null || this is JsonNull) null else this as? JsonObject ?: throw IllegalArgumentException("$this is no object")

/** The type of a step of the tokenizer. */
internal val JsonObject.type: String get() = text("type")

internal fun JsonObject.text(key: String): String = getValue(key).jsonPrimitive.content

internal fun JsonObject.flag(key: String, absent: Boolean): Boolean = get(key)?.takeIf { it !is JsonNull }?.jsonPrimitive?.boolean ?: absent

/** The characters that stand for bytes in byte-level tokenizers (GPT-2's `bytes_to_unicode`). */
internal object ByteCharacters {
    private val characters = CharArray(256)

    /** By byte. */
    fun of(byte: Byte): Char = characters[byte.toInt() and 0xFF]

    /** The byte of a character, or -1. */
    fun byteOf(character: Char): Int = if (character.code < bytes.size) bytes[character.code] else -1

    private val bytes = IntArray(512) { -1 }

    init {
        // Printable bytes stand for themselves, the others follow from 256 on.
        val printable = ('!'.code..'~'.code) + (0xA1..0xAC) + (0xAE..0xFF)
        printable.forEach { characters[it] = it.toChar() }
        (0..255).minus(printable.toSet()).forEachIndexed { place, byte -> characters[byte] = (256 + place).toChar() }
        characters.forEachIndexed { byte, character -> bytes[character.code] = byte }
    }
}
