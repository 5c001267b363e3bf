package dev.lesonnx

import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import java.text.Normalizer
import java.util.regex.Pattern

/** A `normalizer` of `tokenizer.json`: text in, text out, as the tokenizers library has it. Immutable, safe to share. */
internal fun interface TextNormalizer {
    fun apply(text: String): String

    companion object {
        /** The one that a file describes, null for none; IllegalArgumentException for one that is not known here. */
        fun of(description: JsonElement?): TextNormalizer? = description.step()?.let(::of)

        private fun of(description: JsonObject): TextNormalizer = when (val type = description.type) {
            "NFC", "NFD", "NFKC", "NFKD" -> Normalizer.Form.valueOf(type).let { form -> TextNormalizer { Normalizer.normalize(it, form) } }
            "Lowercase" -> TextNormalizer { it.lowercase() }
            "Prepend" -> description.text("prepend").let { prefix -> TextNormalizer { if (it.isEmpty()) it else prefix + it } }
            "Replace" -> TextNormalizer(Replacement(description)::apply)
            "Sequence" -> {
                val steps = description.getValue("normalizers").jsonArray.map { of(it.jsonObject) }
                TextNormalizer { text -> steps.fold(text) { changed, step -> step.apply(changed) } }
            }
            else -> throw IllegalArgumentException("normalizer '$type' is not known")
        }
    }
}

/** A `pre_tokenizer` of `tokenizer.json`: cuts a text into words. Immutable, safe to share. */
internal fun interface PreTokenizer {
    /** [isFirst]: the text is the beginning of all. */
    fun words(text: String, isFirst: Boolean): List<String>

    companion object {
        private val GPT2_WORDS = unicodePattern("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+")

        /** The one that a file describes, null for none; IllegalArgumentException for one that is not known here. */
        fun of(description: JsonElement?): PreTokenizer? = description.step()?.let(::of)

        private fun of(description: JsonObject): PreTokenizer = when (val type = description.type) {
            "ByteLevel" -> byteLevel(description.flag("add_prefix_space", true), description.flag("use_regex", true))
            "Digits" -> unicodePattern(if (description.flag("individual_digits", false)) "\\p{N}" else "\\p{N}+").let { digits ->
                PreTokenizer { text, _ -> isolated(text, digits) }
            }
            "Split" -> split(description)
            "Metaspace" -> Metaspace(description).let { marks -> PreTokenizer(marks::words) }
            "Sequence" -> {
                val steps = description.getValue("pretokenizers").jsonArray.map { of(it.jsonObject) }
                PreTokenizer { text, isFirst ->
                    steps.fold(listOf(text)) { words, step ->
                        words.flatMapIndexed { place, word -> step.words(word, isFirst && place == 0) }
                    }
                }
            }
            else -> throw IllegalArgumentException("pre_tokenizer '$type' is not known")
        }

        private fun split(description: JsonObject): PreTokenizer {
            val pattern = pattern(description)
            val isInverted = description.flag("invert", false)
            return when (val behavior = description.text("behavior")) {
                "Isolated" -> PreTokenizer { text, _ -> isolated(text, pattern) }
                "Removed" -> PreTokenizer { text, _ -> if (isInverted) matches(text, pattern) else between(text, pattern) }
                "MergedWithPrevious" -> {
                    require(!isInverted) { "behavior '$behavior' of a Split is not known inverted" }
                    PreTokenizer { text, _ -> endingIn(text, pattern) }
                }
                else -> throw IllegalArgumentException("behavior '$behavior' of a Split is not known")
            }
        }

        private fun byteLevel(addsSpace: Boolean, cutsWords: Boolean) = PreTokenizer { text, _ ->
            val spaced = if (addsSpace && !text.startsWith(' ')) " $text" else text
            (if (cutsWords) isolated(spaced, GPT2_WORDS) else listOf(spaced)).map { word ->
                val bytes = word.toByteArray(Charsets.UTF_8)
                String(CharArray(bytes.size) { ByteCharacters.of(bytes[it]) })
            }
        }

        /** Matches and what is between them, in order. */
        private fun isolated(text: String, pattern: Pattern): List<String> = cut(text, pattern) { pieces, begin, start, end ->
            if (start > begin) pieces += text.substring(begin, start)
            if (end > start) pieces += text.substring(start, end)
        }

        private fun between(text: String, pattern: Pattern): List<String> =
            cut(text, pattern) { pieces, begin, start, _ -> if (start > begin) pieces += text.substring(begin, start) }

        private fun matches(text: String, pattern: Pattern): List<String> =
            cut(text, pattern) { pieces, _, start, end -> if (end > start) pieces += text.substring(start, end) }

        private fun endingIn(text: String, pattern: Pattern): List<String> =
            cut(text, pattern) { pieces, begin, _, end -> if (end > begin) pieces += text.substring(begin, end) }

        /** Calls [piece] for each match with the end of the one before, and at the end with an empty match. */
        private inline fun cut(text: String, pattern: Pattern, piece: (MutableList<String>, Int, Int, Int) -> Unit): List<String> {
            val pieces = ArrayList<String>()
            val matcher = pattern.matcher(text)
            var begin = 0
            while (matcher.find()) {
                if (matcher.end() == matcher.start()) continue
                piece(pieces, begin, matcher.start(), matcher.end())
                begin = matcher.end()
            }
            piece(pieces, begin, text.length, text.length)
            return pieces
        }
    }
}

/** `Replace`: what matches a pattern becomes a text. */
internal class Replacement(description: JsonObject) {
    private val pattern = pattern(description)
    private val content = java.util.regex.Matcher.quoteReplacement(description.text("content"))

    fun apply(text: String): String = pattern.matcher(text).replaceAll(content)
}

/** `Metaspace`: spaces become marks, and a word begins with its mark. */
internal class Metaspace(description: JsonObject) {
    val mark: String = description.text("replacement")
    private val scheme = if ("prepend_scheme" in description) description.text("prepend_scheme") else if (description.flag("add_prefix_space", true)) "always" else "never"
    private val splits = description.flag("split", true)

    /** Whether encoding puts a mark at the beginning. */
    val isPrepended: Boolean get() = scheme != "never"

    fun words(text: String, isFirst: Boolean): List<String> {
        val marked = text.replace(" ", mark)
        val prefix = if ((scheme == "always" || (scheme == "first" && isFirst)) && !marked.startsWith(mark)) mark else ""
        val whole = prefix + marked
        if (!splits) return listOf(whole)
        val words = ArrayList<String>()
        var begin = 0
        while (begin < whole.length) {
            val next = whole.indexOf(mark, begin + 1).let { if (it < 0) whole.length else it }
            words += whole.substring(begin, next)
            begin = next
        }
        return words
    }
}

private fun pattern(description: JsonObject): Pattern {
    val pattern = description.getValue("pattern").jsonObject
    return if ("Regex" in pattern) unicodePattern(pattern.text("Regex")) else Pattern.compile(Pattern.quote(pattern.text("String")))
}

/** Space of Unicode, as the content of a character class. */
private const val SPACE = "\\t-\\r\\x85\\p{Z}"

/**
 * A pattern as the tokenizers library reads it: `\s`, `\d` and `\w` mean Unicode's. Java's are ASCII's, Android's Unicode's, and
 * the flag that would make them alike is an error on Android; so they are written out.
 */
internal fun unicodePattern(regex: String): Pattern {
    val written = StringBuilder()
    var depth = 0
    var place = 0
    while (place < regex.length) {
        val character = regex[place]
        if (character == '\\' && place + 1 < regex.length) {
            written.append(
                when (val escape = regex[place + 1]) {
                    's' -> if (depth > 0) SPACE else "[$SPACE]"
                    'S' -> "[^$SPACE]"
                    'd' -> "\\p{Nd}"
                    'w' -> if (depth > 0) "\\p{L}\\p{M}\\p{N}\\p{Pc}" else "[\\p{L}\\p{M}\\p{N}\\p{Pc}]"
                    else -> "\\$escape"
                },
            )
            place += 2
            continue
        }
        if (character == '[') depth++
        if (character == ']') depth--
        written.append(character)
        place++
    }
    return Pattern.compile(written.toString(), Pattern.UNICODE_CASE)
}
