package dev.lesonnx

/** What decoding puts in the place of bytes that are no character, or not yet. */
internal const val REPLACEMENT = '\uFFFD'

/** A character has at most 4 bytes, so the beginning of one at most 3 tokens. */
private const val MAX_BYTES_MISSING = 3

/** From here on a window without whole characters is shortened. */
private const val LONG_WINDOW_TOKENS = 16
private const val MAX_WINDOW_TOKENS = 64

/** Token ids to text, as a stream needs it; a tokenizer is one. Safe to share between threads. */
interface TokenTexts {
    /** The text of token ids; bytes that are no character become U+FFFD, ids beyond the vocabulary nothing. */
    fun decode(ids: IntArray, skipSpecialTokens: Boolean = true): String

    /** Whether decoding skips this token: special, or beyond the vocabulary. */
    fun isSilent(token: Int): Boolean
}

/**
 * Turns tokens into text as they come; belongs to one sequence, not thread-safe.
 *
 * The pieces together are what decoding all tokens at once gives, and no piece ends inside a character. Each step decodes a
 * short window: the tokens of the last piece, which tell whether a leading space belongs to the text, and those since.
 */
class StreamDecoder(private val texts: TokenTexts, private val skipSpecialTokens: Boolean = true) {
    private var window = IntArray(0)
    private var contextTokens = 0 // tokens of the window whose text is out
    private var emitted = 0 // chars of the window's text

    /** Add a token; the text that is certain by now, perhaps none. */
    fun push(token: Int): String {
        if (skipSpecialTokens && texts.isSilent(token)) return ""
        window += token
        val text = decode(window)
        // With byte fallback a whole run of bytes is U+FFFD until its last character is complete, so none of it is sure.
        val certain = text.trimEnd(REPLACEMENT).length
        val piece = if (certain > emitted) text.substring(emitted, certain) else ""
        emitted += piece.length
        if (piece.isNotEmpty() && certain == text.length) {
            window = window.copyOfRange(contextTokens, window.size)
            contextTokens = window.size
            emitted = decode(window).length
        } else if (window.size - contextTokens >= LONG_WINDOW_TOKENS) {
            return piece + shorten(text)
        }
        return piece
    }

    /** The rest, at the end of the text: bytes that never became a character are U+FFFD. Then it is empty again. */
    fun flush(): String {
        val piece = decode(window).drop(emitted)
        window = IntArray(0)
        contextTokens = 0
        emitted = 0
        return piece
    }

    private fun decode(ids: IntArray): String = texts.decode(ids, skipSpecialTokens)

    /** Take the beginning off a long window of broken bytes where its text falls apart, by force when very long. */
    private fun shorten(text: String): String {
        var keep = (MAX_BYTES_MISSING + 1 until LONG_WINDOW_TOKENS).firstOrNull { keep ->
            decode(window.copyOf(window.size - keep)) + decode(window.copyOfRange(window.size - keep, window.size)) == text
        }
        val head: String
        if (keep != null) {
            head = decode(window.copyOf(window.size - keep))
        } else {
            if (window.size < MAX_WINDOW_TOKENS) return ""
            keep = MAX_BYTES_MISSING
            head = text.substring(0, text.offsetByCodePoints(text.length, -keep))
        }
        val piece = head.drop(emitted)
        emitted = maxOf(0, emitted - head.length)
        contextTokens = 0
        window = window.copyOfRange(window.size - keep, window.size)
        return piece
    }
}

/**
 * Ends a streamed text before the first stop string, wherever the pieces' borders lie; belongs to one sequence.
 *
 * The stop string that is complete first counts (of several, the longest). Text that may become one is held back.
 *
 * @throws InputError where a stop string is empty
 */
class StopChecker(private val stops: List<String>) {
    private var held = ""

    /** The stop string that ended the text; null as long as none did. */
    var stoppedBy: String? = null
        private set

    init {
        if (stops.any { it.isEmpty() }) throw InputError("a stop string is empty, expected at least one character")
    }

    /** Add a piece; what may be shown of the text. After a stop nothing more comes. */
    fun push(piece: String): String {
        if (stoppedBy != null) return ""
        val text = held + piece
        val stop = stops.filter { it in text }.minWithOrNull(compareBy({ text.indexOf(it) + it.length }, text::indexOf))
        if (stop != null) {
            stoppedBy = stop
            held = ""
            return text.substring(0, text.indexOf(stop))
        }
        held = text.takeLast(stops.maxOfOrNull { overlap(text, it) } ?: 0)
        return text.dropLast(held.length)
    }

    /** What was held back, at the end of the text. */
    fun flush(): String = held.also { held = "" }

    /** The longest proper beginning of [stop] that [text] ends with, in chars. */
    private fun overlap(text: String, stop: String): Int {
        for (length in minOf(text.length, stop.length - 1) downTo 1) {
            if (text.endsWith(stop.substring(0, length))) return length
        }
        return 0
    }
}
