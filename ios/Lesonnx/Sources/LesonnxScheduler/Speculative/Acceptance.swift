// How often drafts are right: measured by position and by the drafter's own confidence. Pure integers; it knows no tokens and no
// time. `docs/speculation.md` states the arithmetic.

/// How many drafts of one kind were judged and how many were right, both fading.
private struct Counts {
    /// As so many drafts the prior counts.
    static let priorSamples = 2
    /// Both are halved when so many have been judged, so what is long ago fades.
    static let limit = 64

    var judged = 0
    var right = 0

    /// Of `one`.
    func odds(prior: Int) -> Int { (right * one + Self.priorSamples * prior) / (judged + Self.priorSamples) }

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
    private static let firstOdds = one / 2
    private static let confidenceShift = 10
    private static let numBins = one >> confidenceShift

    private var byPosition = Array(repeating: Counts(), count: maxDraftTokens)
    private var byConfidence = Array(repeating: Counts(), count: numBins)
    /// By position, made anew with each judgement; what is not known of a slot is taken from the one before it.
    private var odds = Array(repeating: firstOdds, count: maxDraftTokens)

    /// Of `one`: by the slot's confidence where the drafter gives one, else by position.
    func odds(slot: Int, confidence: [Int]?) -> Int {
        guard let confidence else { return odds[slot] }
        let bin = Self.bin(confidence[slot])
        // A drafter's word counts half until it is measured, which costs nothing: unverified drafts are judged too.
        let middle = (2 * bin + 1) << (Self.confidenceShift - 1)
        return byConfidence[bin].odds(prior: middle / 2)
    }

    /// Of `drafted` tokens the first `accepted` were right; behind the first wrong one nothing is known.
    mutating func judge(drafted: Int, accepted: Int, confidence: [Int]?) {
        for slot in 0..<min(drafted, accepted + 1) {
            byPosition[slot].judge(slot < accepted)
            if let confidence {
                byConfidence[Self.bin(confidence[slot])].judge(slot < accepted)
            }
        }
        var before = Self.firstOdds
        for slot in odds.indices {
            before = byPosition[slot].odds(prior: before)
            odds[slot] = before
        }
    }

    private static func bin(_ confidence: Int) -> Int { min(confidence >> confidenceShift, numBins - 1) }
}
