// How often drafts are right: measured by position and by the drafter's own confidence. Pure integers; it knows no tokens and no
// time. `docs/speculation.md` states the arithmetic.

/// How many drafts of one kind were judged and how many were right, both fading.
private struct Counts {
    /// As so many drafts the prior counts.
    static let priorSamples = 2
    /// Both are halved when so many have been judged, so what is long ago fades.
    static let limit = 64

    let prior: Int
    var judged = 0
    var right = 0

    init(prior: Int) { self.prior = prior }

    /// Of `one`.
    var odds: Int { (right * one + Self.priorSamples * prior) / (judged + Self.priorSamples) }

    mutating func judge(_ isRight: Bool) {
        judged += 1
        right += isRight ? 1 : 0
        if judged == Self.limit {
            judged >>= 1
            right >>= 1
        }
    }
}

/// The odds that a draft's slot is accepted, given that all slots before it are. A value, owned by `Pricing`.
struct Acceptance: Sendable {
    private static let confidenceShift = 10
    private static let numBins = one >> confidenceShift

    private var byPosition = Array(repeating: Counts(prior: one / 2), count: maxDraftTokens)
    // A drafter's word counts half until it is measured: that costs nothing, since unverified drafts are judged too.
    private var byConfidence = (0..<numBins).map { bin in
        Counts(prior: ((2 * bin + 1) << (confidenceShift - 1)) / 2)
    }

    /// Of `one`: by the slot's confidence where the drafter gives one, else by position.
    func odds(slot: Int, confidence: [Int]?) -> Int {
        guard let confidence else { return byPosition[slot].odds }
        return byConfidence[Self.bin(confidence[slot])].odds
    }

    /// Of `drafted` tokens that were verified the first `accepted` were right; behind the first wrong one nothing is known.
    mutating func judge(drafted: Int, accepted: Int, confidence: [Int]?) {
        for slot in 0..<min(drafted, accepted + 1) {
            byPosition[slot].judge(slot < accepted)
            if let confidence {
                byConfidence[Self.bin(confidence[slot])].judge(slot < accepted)
            }
        }
    }

    private static func bin(_ confidence: Int) -> Int { min(confidence >> confidenceShift, numBins - 1) }
}
