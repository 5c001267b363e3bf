package dev.lesonnx

/** Text to token ids and back. Thread-safe; whoever opened it closes it. */
interface Tokenizer : TokenTexts, AutoCloseable {
    /**
     * Token ids of a text. Names of special tokens in it become those tokens. [addSpecialTokens] adds what the tokenizer puts
     * around a text (a BOS token, say); false for text that a chat format rendered. [InputError] for an unpaired surrogate.
     */
    fun encode(text: String, addSpecialTokens: Boolean): IntArray

    /** The id of a token by its name, such as `<|im_end|>`; null where there is none. */
    fun tokenId(token: String): Int?

    /** The name of a token, as the vocabulary writes it; null beyond the vocabulary. */
    fun tokenName(token: Int): String?
}

/** [InputError] where the text holds half of a surrogate pair: native tokenizers would each make something else of it. */
internal fun checkUnicode(text: String) {
    var place = 0
    while (place < text.length) {
        val isPair = text[place].isHighSurrogate() && place + 1 < text.length && text[place + 1].isLowSurrogate()
        if (text[place].isSurrogate() && !isPair) throw InputError("the text holds an unpaired surrogate, expected valid Unicode")
        place += if (isPair) 2 else 1
    }
}
