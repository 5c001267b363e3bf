/// Turns token ids into text; what `StreamDecoder` needs of a tokenizer.
public protocol TokenDecoding: Sendable {
    /// The text of token ids; bytes that are no character become U+FFFD, ids beyond the vocabulary nothing.
    func decode(_ ids: [Int], skipSpecialTokens: Bool) -> String

    /// Whether decoding skips this token: special, or beyond the vocabulary.
    func isSilent(_ token: Int) -> Bool
}
