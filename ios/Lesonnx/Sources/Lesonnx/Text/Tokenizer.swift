import LesonnxScheduler

/// Text to token ids and back. Immutable, so tasks may share it.
public protocol Tokenizer: TokenDecoding {
    /// Token ids of a text. Names of special tokens in it become those tokens.
    ///
    /// `addSpecialTokens` adds what the tokenizer puts around a text (a BOS token, say); false for text of a chat format.
    func encode(_ text: String, addSpecialTokens: Bool) throws -> [Int]
}
