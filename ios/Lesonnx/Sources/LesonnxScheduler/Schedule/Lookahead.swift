// How far a prediction is trusted: odds by rank, measured, and a throttle that turns speculation down. It knows nothing of
// memory or loads under way. Pure integers.

/// An expert (`expert_idx`) and its rank in a prediction, 0 the best.
struct Ranked: Equatable, Sendable {
    var expert: Int
    var rank: Int
}

/// Measured odds that the expert of a given rank is used, by layer and moment; and the throttle. Owned by the scheduler.
///
/// The odds are learned from every prediction, loaded or not, so speculation that was turned down knows when it would pay
/// again.
struct Lookahead: Sendable {
    /// All of the speculative bytes are allowed.
    static let full = 64
    /// Predictions of a layer are told apart as the first since its last visit and any later one.
    private static let moments = 2
    /// Of more rows, only the last ones are ranked: together they name most of what the chunk needs.
    private static let predictedRows = 32
    private static let firstOdds = one * 5 / 8
    private static let extraOdds = one / 4
    private static let oddsShift = 4
    private static let useful = 1
    private static let wasted = -1
    private static let slowed = -2
    private static let recoveryVisits = 64
    private static let slowFactor = 2
    private static let readShift = 4

    /// Share of the speculative bytes allowed, of `full`.
    private(set) var level = Self.full
    private let numExperts: [Int]
    private let ranks: [Int]  // by layer: how many ranks count
    private var odds: [[[Int]]]  // by layer, moment, rank
    private var named: [[[Ranked]]]  // by layer and moment: what was named that is not in memory
    private var visits = 0
    private var usPerMib = 0  // demand reads with no speculative read beside them; 0: none seen

    init(numExperts: [Int], numExpertsPerTok: [Int]) {
        self.numExperts = numExperts
        ranks = zip(numExperts, numExpertsPerTok).map { n, k in min(n, k + (k + 1) / 2) }
        odds = zip(ranks, numExpertsPerTok).map { ranks, k in
            let first =
                Array(repeating: Self.firstOdds, count: min(k, ranks))
                + Array(repeating: Self.extraOdds, count: max(0, ranks - k))
            return Array(repeating: first, count: Self.moments)
        }
        named = numExperts.map { _ in [] }
    }

    /// The experts that fixed-point `scores` [T,E], flat, name; best rank first.
    ///
    /// A row ranks by descending score, ties by ascending expert; over several rows an expert counts with its best rank, ties
    /// by ascending expert.
    func rank(layer: Int, scores: [Int32]) -> [Ranked] {
        let n = numExperts[layer]
        let ranks = self.ranks[layer]
        let rows = scores.count / n
        let firstRow = max(0, rows - Self.predictedRows)
        if rows - firstRow == 1 {
            let order = leading(scores[(firstRow * n)...], count: ranks)
            return order.indices.map { Ranked(expert: order[$0], rank: $0) }
        }
        var bestRank = Array(repeating: ranks, count: n)
        for row in firstRow..<rows {
            for (rank, expert) in leading(scores[(row * n)..<(row * n + n)], count: ranks).enumerated() {
                bestRank[expert] = min(bestRank[expert], rank)
            }
        }
        var result: [Ranked] = []
        for rank in 0..<ranks {
            for expert in 0..<n where bestRank[expert] == rank {
                result.append(Ranked(expert: expert, rank: rank))
            }
        }
        return result
    }

    /// The first `count` experts of a row, by descending score and ascending expert: by insertion, since few are kept.
    private func leading(_ row: ArraySlice<Int32>, count: Int) -> [Int] {
        row.withUnsafeBufferPointer { row in
            [Int](unsafeUninitializedCapacity: count + 1) { order, kept in
                kept = 0
                for expert in row.indices {
                    let score = row[expert]
                    if kept == count && row[order[kept - 1]] >= score {
                        continue
                    }
                    var place = kept
                    while place > 0 && row[order[place - 1]] < score {
                        order[place] = order[place - 1]
                        place -= 1
                    }
                    order[place] = expert
                    kept = min(kept + 1, count)
                }
            }
        }
    }

    /// What a prediction named that is not in memory, to be judged at the layer's visit. Gives the odds by rank.
    mutating func note(layer: Int, absent: [Ranked]) -> [Int] {
        let moment = min(named[layer].count, Self.moments - 1)
        if moment < named[layer].count {
            named[layer][moment] = absent
        } else {
            named[layer].append(absent)
        }
        return odds[layer][moment]
    }

    /// The layer was visited and its rows used the experts that `isUsed` marks: learn the odds, forget the predictions.
    mutating func observe(layer: Int, isUsed: [Bool]) {
        visits += 1
        if visits % Self.recoveryVisits == 0 {
            level = min(Self.full, level + 1)
        }
        for moment in named[layer].indices {
            for ranked in named[layer][moment] {
                let old = odds[layer][moment][ranked.rank]
                odds[layer][moment][ranked.rank] = old + (((isUsed[ranked.expert] ? one : 0) - old) >> Self.oddsShift)
            }
        }
        named[layer].removeAll(keepingCapacity: true)
    }

    /// A speculative load was used at its layer's visit, or was not.
    mutating func outcome(isUseful: Bool) {
        level = max(0, min(Self.full, level + (isUseful ? Self.useful : Self.wasted)))
    }

    /// A demand load took `readUs` microseconds; `beside`: a speculative one was under way when it began.
    mutating func demandRead(costBytes: Int, readUs: Int, beside: Bool) {
        let new = (readUs << 20) / costBytes
        if !beside {
            usPerMib += usPerMib == 0 ? new : (new - usPerMib) >> Self.readShift
        } else if usPerMib > 0 && new > Self.slowFactor * usPerMib {
            level = max(0, level + Self.slowed)
        }
    }
}
