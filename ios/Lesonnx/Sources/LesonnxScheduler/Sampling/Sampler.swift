// How the next token is chosen, so that every host chooses the same one, bit for bit. Float32 logits and token ids go in, a
// token id comes out; it knows nothing of models or text.
//
// The steps are those of `lesonnx/sampling.py`, in its order, each operation IEEE 754 float64, rounded to nearest, one at a time:
//
// 1. Repetition penalty: of a seen token a positive logit is divided by it, any other multiplied; computed in float64, rounded
//    to float32. That is the token's *score*; -0 counts as +0.
// 2. Order: score descending, then id ascending. Temperature 0 takes the first and draws nothing.
// 3. Temperature: `x = (score - greatest score) / temperature`; the token's *weight* is `expNonPositive(x)`.
// 4. Top-k: the first k in the order; 0, or V and more, is off.
// 5. Top-p: the shortest beginning of the order whose weights reach `topP * total`. Weights are added one by one in the order;
//    `total` is that sum over the k of step 4, or, without top-k, the sum over all tokens by ascending id.
// 6. Min-p: the longest beginning of what is left whose weights are at least `minP`. Weights of 0 are cut off in any case.
// 7. One draw u: the first token whose running sum, in the order, exceeds `u * kept`; where rounding leaves none, the last one.
//    `kept` is the running sum over what is left; where none of steps 4 to 6 is on, it is `total`.

/// The length of the order that is tried first; each further try takes 16 times as many. Most draws need only the first.
private let firstCandidates = 256

/// A token and its weight.
public struct Weighted: Equatable, Sendable {
    public var id: Int
    public var weight: Double
}

/// Chooses tokens for one sequence; a value that owns the random numbers and what the repetition penalty has seen.
///
/// `sample` does not accept: the caller accepts the prompt's tokens and every token that stays, so that a draft can be tried and
/// taken back.
public struct Sampler: Sendable {
    public let options: SamplingOptions
    /// What tokens are drawn by; verification of drafts draws from the same.
    var random: Pcg32
    private var seen: [Int: Int] = [:]

    public init(_ options: SamplingOptions = .greedy) {
        self.options = options
        random = Pcg32(seed: options.seed)
    }

    /// Count a token of the prompt or of the output for the repetition penalty.
    public mutating func accept(_ token: Int) throws(LesonnxError) {
        if token < 0 {
            throw .input("token id is \(token), expected at least 0")
        }
        seen[token, default: 0] += 1
    }

    /// `accept` each.
    public mutating func accept(all tokens: some Sequence<Int>) throws(LesonnxError) {
        for token in tokens {
            try accept(token)
        }
    }

    /// Take back one `accept` of this token; throws `input` where there was none.
    public mutating func retract(_ token: Int) throws(LesonnxError) {
        guard let count = seen[token] else {
            throw .input("token \(token) was never accepted, so it cannot be taken back")
        }
        seen[token] = count == 1 ? nil : count - 1
    }

    /// The next token's id from float32 logits [V]: one draw, or none when greedy.
    ///
    /// -inf excludes a token. Throws `input` for no logits, `failure` for NaN, +inf or nothing but -inf.
    public mutating func sample(_ logits: UnsafeBufferPointer<Float>) throws(LesonnxError) -> Int {
        choose(try scores(logits))
    }

    /// The same for an array.
    public mutating func sample(_ logits: [Float]) throws(LesonnxError) -> Int {
        choose(try scores(logits))
    }

    private mutating func choose(_ scored: (scores: [Float], greatest: Float)) -> Int {
        let (scores, greatest) = scored
        if options.temperature == 0 {
            return scores.firstIndex(of: greatest)!
        }
        if isFiltered(scores.count) {
            let left = filtered(scores, greatest)
            let kept = left.reduce(0) { $0 + $1.weight }
            let target = random.uniform() * kept
            return Self.first(of: left, whoseSumExceeds: target) ?? left[left.count - 1].id
        }
        let everything = weights(of: scores, greatest)
        let target = random.uniform() * everything.reduce(0, +)
        var order: [Weighted] = []
        for count in Self.growingCounts(scores.count) {
            order = Self.order(scores, count).map { Weighted(id: $0, weight: everything[$0]) }
            if let id = Self.first(of: order, whoseSumExceeds: target) {
                return id
            }
        }
        return order.last { $0.weight != 0 }!.id  // the first weight is 1
    }

    /// What `sample` would draw from, without drawing, in order: ids and probabilities above 0.
    ///
    /// A probability is the token's weight divided by `kept` (see above); greedy gives one id with probability 1. Throws as
    /// `sample`.
    public func distribution(_ logits: UnsafeBufferPointer<Float>) throws(LesonnxError) -> [Weighted] {
        distribution(try scores(logits))
    }

    /// The same for an array.
    public func distribution(_ logits: [Float]) throws(LesonnxError) -> [Weighted] {
        distribution(try scores(logits))
    }

    private func distribution(_ scored: (scores: [Float], greatest: Float)) -> [Weighted] {
        let (scores, greatest) = scored
        if options.temperature == 0 {
            return [Weighted(id: scores.firstIndex(of: greatest)!, weight: 1)]
        }
        let left: [Weighted]
        let kept: Double
        if isFiltered(scores.count) {
            left = filtered(scores, greatest)
            kept = left.reduce(0) { $0 + $1.weight }
        } else {
            let everything = weights(of: scores, greatest)
            left = cut(Self.order(scores, scores.count).map { Weighted(id: $0, weight: everything[$0]) }, minP: 0)
            kept = everything.reduce(0, +)
        }
        return left.map { Weighted(id: $0.id, weight: $0.weight / kept) }
    }

    /// Step 1: checked logits [V], penalised, without -0; and the greatest.
    private func scores(_ logits: some Collection<Float>) throws(LesonnxError) -> (scores: [Float], greatest: Float) {
        if logits.isEmpty {
            throw .input("logits are empty, expected float32 [V]")
        }
        var scores = logits.map { $0 + 0 }
        let penalty = options.repetitionPenalty
        if penalty != 1 {
            for token in seen.keys where token < scores.count {
                let wide = Double(scores[token])
                scores[token] = Float(wide > 0 ? wide / penalty : wide * penalty) + 0
            }
        }
        var greatest = -Float.infinity
        var hasNaN = false
        for score in scores {
            greatest = max(greatest, score)
            hasNaN = hasNaN || score.isNaN
        }
        if hasNaN || !greatest.isFinite {
            let what = hasNaN ? "NaN" : greatest > 0 ? "+inf" : "nothing but -inf"
            throw .failure("logits hold \(what): the model's output is broken, so no token can be chosen")
        }
        return (scores, greatest)
    }

    private func isFiltered(_ vocabSize: Int) -> Bool {
        isTopK(vocabSize) || options.topP < 1 || options.minP > 0
    }

    private func isTopK(_ vocabSize: Int) -> Bool {
        options.topK > 0 && options.topK < vocabSize
    }

    /// Step 3.
    private func weights(of scores: some Collection<Float>, _ greatest: Float) -> [Double] {
        let top = Double(greatest)
        var weights = scores.map { (Double($0) - top) / options.temperature }
        weights.withUnsafeMutableBufferPointer { expNonPositive($0) }
        return weights
    }

    /// Steps 4 to 6: what is left, in order; at least one, and no weight 0.
    private func filtered(_ scores: [Float], _ greatest: Float) -> [Weighted] {
        var left: [Weighted] = []
        if isTopK(scores.count) {
            left = weighted(Self.order(scores, options.topK), scores, greatest)
            if options.topP < 1 {
                let total = left.reduce(0) { $0 + $1.weight }
                left = Array(left.prefix(Self.reach(left, options.topP * total) ?? left.count))
            }
        } else if options.topP < 1 {
            let everything = weights(of: scores, greatest)
            let goal = options.topP * everything.reduce(0, +)
            for count in Self.growingCounts(scores.count) {
                left = Self.order(scores, count).map { Weighted(id: $0, weight: everything[$0]) }
                if let reached = Self.reach(left, goal) {
                    left.removeSubrange(reached...)
                    break
                }
            }
        } else {
            for count in Self.growingCounts(scores.count) {
                left = weighted(Self.order(scores, count), scores, greatest)
                if left[left.count - 1].weight < options.minP {
                    break
                }
            }
        }
        return cut(left, minP: options.minP)
    }

    private func weighted(_ ids: [Int], _ scores: [Float], _ greatest: Float) -> [Weighted] {
        zip(ids, weights(of: ids.map { scores[$0] }, greatest)).map { Weighted(id: $0, weight: $1) }
    }

    /// The longest beginning with weights of at least `minP`, and above 0.
    private func cut(_ order: [Weighted], minP: Double) -> [Weighted] {
        Array(order.prefix { $0.weight >= minP && $0.weight != 0 })
    }

    /// How many weights from the first on reach the goal; nil where all together do not.
    private static func reach(_ order: [Weighted], _ goal: Double) -> Int? {
        var sum = 0.0
        for (i, token) in order.enumerated() {
            sum += token.weight
            if sum >= goal {
                return i + 1
            }
        }
        return nil
    }

    private static func first(of order: [Weighted], whoseSumExceeds target: Double) -> Int? {
        var sum = 0.0
        for token in order {
            sum += token.weight
            if sum > target {
                return token.id
            }
        }
        return nil
    }

    /// Lengths of longer and longer beginnings of the order; the last is all of it.
    private static func growingCounts(_ vocabSize: Int) -> [Int] {
        var counts: [Int] = []
        var count = firstCandidates
        while count < vocabSize {
            counts.append(count)
            count *= 16
        }
        return counts + [vocabSize]
    }

    /// The first `count` ids of the order, sorting few others: whenever twice as many are collected, the worse half goes.
    static func order(_ scores: [Float], _ count: Int) -> [Int] {
        var keys: [UInt64] = []
        keys.reserveCapacity(min(2 * count, scores.count))
        var worst = UInt64.max
        for (id, score) in scores.enumerated() {
            let key = self.key(score, id)
            if key >= worst {
                continue
            }
            keys.append(key)
            if keys.count == 2 * count && count < scores.count {
                keys.sort()
                keys.removeSubrange(count...)
                worst = keys[count - 1]
            }
        }
        keys.sort()
        return keys.prefix(count).map { Int($0 & 0xFFFF_FFFF) }
    }

    /// Ascends as the order does: the score's bits, made descending, above the id.
    private static func key(_ score: Float, _ id: Int) -> UInt64 {
        let bits = score.bitPattern
        let descending = bits >> 31 == 1 ? bits : ~bits & 0x7FFF_FFFF
        return UInt64(descending) << 32 | UInt64(id)
    }
}
