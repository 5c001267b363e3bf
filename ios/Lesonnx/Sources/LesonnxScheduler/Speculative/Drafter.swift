// What a drafter is: it proposes tokens that may come next; the target runs them all in one pass and keeps the right ones. It knows
// tokens, not how they are verified, and nothing of what a draft costs the target.

/// The most tokens of a draft: the token before them runs in the same pass, of which every row can be gone back to.
public let maxDraftTokens = BundleManifest.rewindableTokens - 1

/// The drafters by the names that `--draft` knows.
public enum DrafterName: String, Equatable, Sendable, CaseIterable {
    /// Nothing is drafted.
    case none
    /// What followed when the last tokens stood there before.
    case ngram
    /// A second, smaller bundle with the same tokenizer.
    case draftModel = "draft-model"
    /// A block drafter that was trained for the model and exported with it.
    case dspark
    /// A checkpoint's own head for tokens to come.
    case mtp
}

/// Tokens that may come next, in order; perhaps none.
public struct Draft: Equatable, Sendable {
    public static let none = Draft()

    public var tokenIds: [Int]
    /// For each token what it was drawn from; nil where tokens were not drawn but chosen.
    public var probabilities: [[Weighted]]?
    /// For each token how likely it is right if all before it are, of `one`; it may depend on the tokens before it, not on the token
    /// itself, and is calibrated by whoever uses it. nil where the drafter has no opinion.
    public var confidence: [Int]?

    public init(_ tokenIds: [Int] = [], probabilities: [[Weighted]]? = nil, confidence: [Int]? = nil) {
        self.tokenIds = tokenIds
        self.probabilities = probabilities
        self.confidence = confidence
    }
}

/// Proposes tokens for one sequence. One thread at a time; owned by a speculator, which closes it.
///
/// A drafter that reads what the target's layers give is a `LayerReader` too.
public protocol Drafter: AnyObject {
    var name: DrafterName { get }
    /// The most it proposes at once, at most `maxDraftTokens`.
    var maxTokens: Int { get }
    /// A proposal takes microseconds, so it is asked even where nothing will be drafted, to learn how often it is right; others are
    /// asked only where their drafts are expected to pay.
    var isFree: Bool { get }

    /// Up to `maxTokens` tokens after `tokenIds`: the whole sequence, the last of which the target has not run. A drafter with logits
    /// chooses by `sampler`, which begins a proposal.
    func propose(after tokenIds: [Int], maxTokens: Int, _ sampler: inout DraftSampler) throws -> Draft

    /// The target has gone back to its first `numTokens` tokens; 0 before another sequence.
    func rewind(to numTokens: Int)

    /// Free what it owns.
    func close()
}

/// A probability as a confidence, of `one`: floor(p * one + 0.5) in float64, from 0 to one; 0 for NaN.
public func fixedConfidence(_ probability: Double) -> Int {
    probability.isNaN ? 0 : Int(min(Double(one), max(0, (probability * Double(one) + 0.5).rounded(.down))))
}
