// How many drafted tokens to verify: as many as make tokens come fastest, none where drafting does not pay. Pure integers and no
// clock: the host says what passes took, so the golden vectors replay. `docs/speculation.md` states the arithmetic.

/// Chooses how many tokens to draft and how many to verify. For each token of the sequence: `ask` how many tokens a drafter should
/// propose, `choose` how many of its draft to verify, and `passed` when the pass is over; `judge` what became of drafts.
public protocol LengthChoice: Sendable {
    /// Whether a length above 0 is possible at all: what it needs to be chosen by need not be found out otherwise.
    var mayDraft: Bool { get }

    /// How many tokens to have drafted, at most `most`; 0: the drafter is not asked.
    ///
    /// `newBytes`: what each of `most` + 1 rows is expected to add to what is read; empty where that is not known.
    mutating func ask(most: Int, isFree: Bool, newBytes: [Int]) -> Int

    /// How many of `drafted` tokens to verify. Other values as in `ask`; a draft that was paid for counts no more.
    ///
    /// `isDrawn`: the tokens were drawn, so the choice may not depend on what comes behind the slot it is about, or the target's
    /// distribution would be lost: it stops at the first drop.
    mutating func choose(drafted: Int, confidence: [Int]?, isFree: Bool, isDrawn: Bool, newBytes: [Int]) -> Int

    /// A pass is over: it took so long and gave so many tokens. `draftUs`: nil where no drafter was asked that costs.
    mutating func passed(
        rows: Int, passUs: Int, stallUs: Int, readBytes: Int, newBytes: [Int], newTokens: Int, draftUs: Int?)

    /// What became of a draft's first `drafted` tokens: verified, or held against what was decoded without them.
    mutating func judge(drafted: Int, accepted: Int, confidence: [Int]?)
}

/// Lengths by measured acceptance and measured time; bounded in what a wrong choice can cost. A value, owned by a speculator.
public struct Pricing: LengthChoice {
    /// Drafting must be faster by one part in so many, since what it is compared with is measured roughly.
    private static let margin = 8
    /// After so many passes with drafts one runs without, to measure again what they are compared with.
    private static let plainAgainPasses = 64
    /// Drafts may cost at most one part in 64 of all time, beyond what they gain.
    private static let allowanceShift = 6
    /// A pass counts for at most so many times what it was expected to take, if the one with drafts before it did not.
    private static let mostCharged = 2
    // In plain passes: what drafts may cost at once, and how much of what they gained counts against later losses.
    private static let slackPasses = 4
    private static let creditPasses = 16
    // Where drafting does not pay, it is tried again after so many passes; each time in vain doubles them.
    private static let firstInterval = 32
    private static let lastInterval = 2048
    private static let probeOdds = one / 4
    /// Plain passes that a drafter that costs is taken to gain each time, before it is known.
    private static let trendPasses = 2
    /// As long as no draft was measured, one is taken to cost an eighth of a plain pass.
    private static let unknownDraftShift = 3
    private static let draftFadeShift = 3

    private(set) var acceptance = Acceptance()
    private(set) var times = PassTimes()
    private var draftUs = 0
    /// What turns with a draft that cost lost on the mean; below 0: gained.
    private var trendUs = 0
    private var debtUs = 0
    private var sincePlain = 0
    private var sinceDraft = 0
    private var interval = firstInterval
    private var isProbe = false
    /// Whether the last pass with drafts took far longer than expected.
    private var wasOdd = false

    public init() {}

    public var mayDraft: Bool {
        times.isKnown && sincePlain < Self.plainAgainPasses && debtUs <= Self.slackPasses * times.passUs(rows: 1)
    }

    public mutating func ask(most: Int, isFree: Bool, newBytes: [Int]) -> Int {
        isProbe = false
        if isFree || most < 1 {
            return most
        }
        // Where it should pay by what slots are worth on the whole and has not, drafts are paid for, then not verified.
        if trendUs > 0 && sinceDraft < interval {
            return 0
        }
        let expectedUs = draftUs > 0 ? draftUs : times.passUs(rows: 1) >> Self.unknownDraftShift
        let length = longest(most, nil, newBytes, draftUs: expectedUs, inOrder: false)
        isProbe = isProbe || (length > 0 && trendUs > 0)
        return length
    }

    public mutating func choose(drafted: Int, confidence: [Int]?, isFree: Bool, isDrawn: Bool, newBytes: [Int]) -> Int {
        if drafted < 1 {
            return 0
        }
        if isFree {
            return longest(drafted, confidence, newBytes, draftUs: 0, inOrder: isDrawn)
        }
        return best(drafted, confidence, newBytes, draftUs: 0, isWanted: isProbe, inOrder: isDrawn)
    }

    public mutating func passed(
        rows: Int, passUs: Int, stallUs: Int, readBytes: Int, newBytes: [Int], newTokens: Int, draftUs: Int?
    ) {
        let plainUs = times.passUs(rows: 1)
        let hasDrafted = rows > 1 || draftUs != nil
        // What another program did to a pass is not the drafts' fault: it happens to plain ones too. What happens twice in a row is.
        let extraBytes = newBytes.prefix(rows).dropFirst().reduce(0, +)
        let mostUs = Self.mostCharged * times.passUs(rows: rows, extraBytes: extraBytes)
        let chargedUs = wasOdd ? passUs : min(passUs, mostUs)
        if hasDrafted {
            wasOdd = passUs > mostUs
        }
        if isProbe {
            // It was tried since what is known of it may be wrong.
            times.forget(rows: rows)
        }
        times.took(rows: rows, passUs: passUs, stallUs: stallUs, readBytes: readBytes, newBytes: newBytes)
        sincePlain = rows == 1 ? 0 : sincePlain + 1
        if debtUs > 0 {
            debtUs = max(0, debtUs - (passUs >> Self.allowanceShift))
        }
        sinceDraft = hasDrafted ? 0 : sinceDraft + 1
        if !hasDrafted {
            return
        }
        let lostUs = chargedUs + (draftUs ?? 0) - newTokens * plainUs
        settle(lostUs: lostUs, plainUs: plainUs)
        if let draftUs {
            let beforeUs = trendUs != 0 ? trendUs : -Self.trendPasses * plainUs
            trendUs = isProbe ? lostUs : beforeUs + ((lostUs - beforeUs) >> Self.draftFadeShift)
            self.draftUs += self.draftUs != 0 ? (draftUs - self.draftUs) >> Self.draftFadeShift : draftUs
        }
    }

    /// A pass with drafts lost so much against plain ones, or gained.
    private mutating func settle(lostUs: Int, plainUs: Int) {
        debtUs = max(debtUs + lostUs, -Self.creditPasses * plainUs)
        if lostUs <= 0 {
            interval = Self.firstInterval
        } else if isProbe {
            interval = min(2 * interval, Self.lastInterval)
        }
    }

    public mutating func judge(drafted: Int, accepted: Int, confidence: [Int]?) {
        acceptance.judge(drafted: drafted, accepted: accepted, confidence: confidence)
    }

    /// The best length where nothing has been paid yet; none where the debt is too large, a probe now and then.
    private mutating func longest(_ most: Int, _ confidence: [Int]?, _ newBytes: [Int], draftUs: Int, inOrder: Bool) -> Int {
        if !mayDraft {
            return 0
        }
        let length = best(most, confidence, newBytes, draftUs: draftUs, isWanted: false, inOrder: inOrder)
        if length > 0 || sinceDraft < interval || acceptance.odds(slot: 0, confidence: confidence) < Self.probeOdds {
            return length
        }
        isProbe = true
        return best(most, confidence, newBytes, draftUs: draftUs, isWanted: true, inOrder: inOrder)
    }

    /// The length, at most `most`, with most expected tokens by expected time; at least 1 where `isWanted`.
    private func best(
        _ most: Int, _ confidence: [Int]?, _ newBytes: [Int], draftUs: Int, isWanted: Bool, inOrder: Bool
    ) -> Int {
        var (best, bestGain, bestUs) = (0, one, times.passUs(rows: 1))
        var (survival, gain, extraBytes) = (one, one, 0)
        for length in 1...most {
            survival = (survival * acceptance.odds(slot: length - 1, confidence: confidence)) >> oddsBits
            gain += survival
            extraBytes += newBytes.isEmpty ? 0 : newBytes[length]
            let us = times.passUs(rows: length + 1, extraBytes: extraBytes) + draftUs
            // The first length must beat drafting nothing clearly, unless it is wanted in any case.
            let margin = Self.margin + (best == 0 ? 1 : 0)
            if (best == 0 && isWanted) || gain * bestUs * Self.margin > bestGain * us * margin {
                (best, bestGain, bestUs) = (length, gain, us)
            } else if inOrder {
                break
            }
        }
        return best
    }
}
