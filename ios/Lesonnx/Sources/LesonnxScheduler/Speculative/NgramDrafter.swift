/// The drafter `ngram`: what followed when the last tokens stood there before, in the prompt or in the output.
///
/// It finds the longest suffix of the sequence that occurs earlier, and proposes what followed it. Each token is indexed once: the
/// place where its pair (the token before it and itself) ended last, chained to the place before that. Memory is two numbers a
/// token; a proposal looks at `mostCandidates` places at most. It knows tokens and no model; `docs/speculation.md` states it exactly.
public final class NgramDrafter: Drafter {
    /// A single token that was there before foretells too little.
    static let leastMatch = 2
    /// Longer matches are as good as one of this length: of them the most recent counts.
    static let mostMatch = 16
    /// Earlier places that are looked at, the most recent ones.
    static let mostCandidates = 16

    public let name = DrafterName.ngram
    public let maxTokens = maxDraftTokens
    public let isFree = true

    private struct Pair: Hashable {
        let first: Int
        let second: Int
    }

    /// By pair, the last place where it ends.
    private var last: [Pair: Int] = [:]
    /// By place, the one before with the same pair; -1 for none.
    private var before: [Int] = []

    public init() {}

    /// As `Drafter.propose`; the sampler is not used, since there is nothing to choose by.
    public func propose(after tokenIds: [Int], maxTokens: Int, _: inout DraftSampler) -> Draft {
        if tokenIds.count < before.count {
            rewind(to: 0)
        }
        index(tokenIds)
        let (place, length) = longestMatch(tokenIds)
        if length < Self.leastMatch || maxTokens < 1 {
            return .none
        }
        let known = tokenIds.count - 1 - place
        var drafted = Array(tokenIds[(place + 1)...].prefix(maxTokens))
        // A copy may run into what it has just written: a period goes on.
        while drafted.count < maxTokens {
            drafted.append(drafted[drafted.count - known])
        }
        // With every token that is right, the match is one longer.
        let lengths = drafted.indices.map { min(length + $0, Self.mostMatch) }
        return Draft(drafted, confidence: lengths.map { one * $0 / ($0 + 1) })
    }

    /// Take in what has come since the last call.
    private func index(_ tokenIds: [Int]) {
        for place in before.count..<tokenIds.count {
            if place == 0 {
                before.append(-1)
                continue
            }
            let pair = Pair(first: tokenIds[place - 1], second: tokenIds[place])
            before.append(last.updateValue(place, forKey: pair) ?? -1)
        }
    }

    /// Where the longest earlier match of the suffix ends, the most recent of equals, and its length; 0 for none.
    private func longestMatch(_ tokenIds: [Int]) -> (place: Int, length: Int) {
        let end = tokenIds.count - 1
        var best = (place: -1, length: 0)
        var place = before.last ?? -1
        for _ in 0..<Self.mostCandidates where place >= 0 && best.length < Self.mostMatch {
            // The pair is the same.
            var length = Self.leastMatch
            while length < Self.mostMatch && length <= place && tokenIds[place - length] == tokenIds[end - length] {
                length += 1
            }
            if length > best.length {
                best = (place, length)
            }
            place = before[place]
        }
        return best
    }

    /// Forget everything where the sequence becomes shorter than what is indexed: the next proposal begins anew.
    public func rewind(to numTokens: Int) {
        if numTokens < before.count {
            last.removeAll(keepingCapacity: true)
            before.removeAll(keepingCapacity: true)
        }
    }

    public func close() {}
}
