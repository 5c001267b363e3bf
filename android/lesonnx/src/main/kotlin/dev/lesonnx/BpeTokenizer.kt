package dev.lesonnx

import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import java.nio.file.Path
import java.util.regex.Pattern

/**
 * A byte-pair tokenizer read from `tokenizer.json`, in Kotlin alone: the same ids as the tokenizers library, where no build of
 * that library is at hand (Android). Immutable, safe to share between threads.
 */
class BpeTokenizer private constructor(file: TokenizerFile) : Tokenizer {
    private val table = TokenTable(file)
    private val model = BpeModel(file.model, table)
    private val normalizer = TextNormalizer.of(file.normalizer)
    private val preTokenizer = PreTokenizer.of(file.preTokenizer)
    private val raw = AddedTokens(file.addedTokens.filterNot { it.normalized }) { it }
    private val normalized = AddedTokens(file.addedTokens.filter { it.normalized }) { normalizer?.apply(it) ?: it }
    private val around = around(file.postProcessor)

    override fun encode(text: String, addSpecialTokens: Boolean): IntArray {
        checkUnicode(text)
        val ids = IntList(text.length / 3)
        if (addSpecialTokens) around.first.forEach(ids::add)
        raw.cut(text, ids::add) { piece, isFirst ->
            val changed = normalizer?.apply(piece) ?: piece
            normalized.cut(changed, ids::add) { rest, isBeginning -> words(rest, isFirst && isBeginning).forEach { model.encode(it, ids) } }
        }
        if (addSpecialTokens) around.second.forEach(ids::add)
        return ids.toIntArray()
    }

    private fun words(text: String, isFirst: Boolean): List<String> = preTokenizer?.words(text, isFirst) ?: listOf(text)

    override fun decode(ids: IntArray, skipSpecialTokens: Boolean): String = table.decode(ids, skipSpecialTokens)

    override fun tokenId(token: String): Int? = table.id(token)

    override fun tokenName(token: Int): String? = table.name(token)

    override fun isSilent(token: Int): Boolean = table.isSilent(token)

    override fun close() = Unit

    /** The ids that a `post_processor` puts before and after a text. */
    private fun around(description: JsonElement?): Pair<List<Int>, List<Int>> {
        val none = emptyList<Int>() to emptyList<Int>()
        val step = description.step() ?: return none
        return when (val type = step.type) {
            "ByteLevel" -> none
            "TemplateProcessing" -> template(step)
            "Sequence" -> step.getValue("processors").jsonArray.map(::around).fold(none) { (before, after), (first, last) ->
                (first + before) to (after + last)
            }
            else -> throw IllegalArgumentException("post_processor '$type' is not known")
        }
    }

    private fun template(step: JsonObject): Pair<List<Int>, List<Int>> {
        val pieces = step.getValue("single").jsonArray.map { it.jsonObject }
        val place = pieces.indexOfFirst { "Sequence" in it }
        require(place >= 0) { "post_processor has no place for the text" }
        fun ids(of: List<JsonObject>) = of.map { piece ->
            val name = piece.getValue("SpecialToken").jsonObject.text("id")
            requireNotNull(table.id(name)) { "post_processor names '$name', which is no token" }
        }
        return ids(pieces.take(place)) to ids(pieces.drop(place + 1))
    }

    companion object {
        /** Reads a `tokenizer.json`; [BundleError] where it is missing, broken or of a kind that is not known here. */
        fun read(path: Path): BpeTokenizer = TokenizerFile.read(path, ::BpeTokenizer)
    }
}

/** Tokens that are found in a text as they stand, the longest of those that begin first. Immutable. */
private class AddedTokens(tokens: List<TokenizerFile.AddedToken>, content: (String) -> String) {
    private val tokens = tokens.associateBy { content(it.content) }.filterKeys(String::isNotEmpty)
    private val pattern = this.tokens.keys.takeIf { it.isNotEmpty() }
        ?.let { names -> Pattern.compile(names.sortedByDescending(String::length).joinToString("|", transform = Pattern::quote)) }

    /** Cuts a text: gives the ids of tokens to [token] and what is between them to [rest], which hears whether it is the beginning. */
    fun cut(text: String, token: (Int) -> Unit, rest: (String, Boolean) -> Unit) {
        var begin = 0
        val matcher = pattern?.matcher(text)
        while (matcher != null && matcher.find()) {
            val found = tokens.getValue(matcher.group())
            var (start, end) = matcher.start() to matcher.end()
            if (found.singleWord && (isWord(text, start - 1) || isWord(text, end))) continue
            if (found.lstrip) while (start > begin && isSpace(text[start - 1])) start--
            if (found.rstrip) while (end < text.length && isSpace(text[end])) end++
            if (start > begin) rest(text.substring(begin, start), begin == 0)
            token(found.id)
            begin = end
            // What a token has taken along is not searched again.
            if (end > matcher.end()) matcher.region(end, text.length)
        }
        if (begin < text.length) rest(text.substring(begin), begin == 0)
    }

    /** Unicode's, which is not Kotlin's. */
    private fun isSpace(character: Char) = character in '\t'..'\r' || character == '\u0085' || Character.isSpaceChar(character)

    private fun isWord(text: String, place: Int) = place in text.indices && (text[place].isLetterOrDigit() || text[place] == '_')
}
