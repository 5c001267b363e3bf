import LesonnxScheduler

/// The drafts of a generation, by position: how many were verified, and how many of them were right.
public struct DraftCounts: Equatable, Sendable, Encodable {
    /// At j, the drafts that had a slot j.
    public private(set) var drafted = [Int](repeating: 0, count: maxDraftTokens)
    /// At j, those of which all slots before j were right: `accepted[j] / judged[j]` is the acceptance at j.
    public private(set) var judged = [Int](repeating: 0, count: maxDraftTokens)
    public private(set) var accepted = [Int](repeating: 0, count: maxDraftTokens)
    /// Passes with drafts.
    public private(set) var passes = 0
    /// What a drafter took that is not free.
    public internal(set) var draftMs = 0.0

    public init() {}

    public var numDrafted: Int { drafted.reduce(0, +) }
    public var numAccepted: Int { accepted.reduce(0, +) }

    /// A pass that verified so many drafts.
    mutating func count(drafted: Int, accepted: Int) {
        passes += 1
        for slot in 0..<drafted {
            self.drafted[slot] += 1
            judged[slot] += slot <= accepted ? 1 : 0
            self.accepted[slot] += slot < accepted ? 1 : 0
        }
    }
}
