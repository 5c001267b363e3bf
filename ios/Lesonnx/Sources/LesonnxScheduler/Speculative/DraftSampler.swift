/// Chooses a draft's tokens as the target would: the same options and repetition penalty, random numbers apart, so that the
/// target's draws do not depend on who drafts.
///
/// A value: it looks at a copy of the target's sampler from `begin` on, so what is chosen leaves no trace in the target's own.
public struct DraftSampler: Sendable {
    static let draftStream = Pcg32.samplerStream + 1

    private var random: Pcg32
    private var sampler: Sampler

    public init(_ target: Sampler) {
        random = Pcg32(seed: target.options.seed, stream: Self.draftStream)
        sampler = target
    }

    /// Whether tokens are drawn: then a draft has `probabilities`.
    public var draws: Bool { sampler.options.temperature > 0 }

    /// A proposal begins, after what the target's penalty has seen so far.
    public mutating func begin(as target: Sampler) { sampler = target }

    /// A token by float32 logits [V] of the place after those chosen so far, and what it was drawn from; greedy draws nothing and
    /// gives nil. Throws as `Sampler.sample`.
    public mutating func choose(_ logits: UnsafeBufferPointer<Float>) throws(LesonnxError) -> (id: Int, distribution: [Weighted]?) {
        if draws {
            let distribution = try sampler.distribution(logits)
            let id = draw(distribution, &random)
            try sampler.accept(id)
            return (id, distribution)
        }
        let id = try sampler.sample(logits)
        try sampler.accept(id)
        return (id, nil)
    }
}

/// One draw u: the first id whose running sum, in order, exceeds `u * total`, `total` the sum over all. Where rounding leaves none,
/// the last one. A distribution is not empty.
func draw(_ distribution: [Weighted], _ random: inout Pcg32) -> Int {
    let total = distribution.reduce(0) { $0 + $1.weight }
    let target = random.uniform() * total
    var sum = 0.0
    for token in distribution {
        sum += token.weight
        if sum > target {
            return token.id
        }
    }
    return distribution[distribution.count - 1].id
}
