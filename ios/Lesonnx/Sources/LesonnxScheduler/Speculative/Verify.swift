// Which drafted tokens stay, and the token after them: the output is the target's own, whoever drafted. It knows logits and draws,
// neither models nor time. Every host gives the same tokens; `docs/speculation.md` states the arithmetic.
//
// Sources: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al.,
// "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.

/// The tokens that come next, at least one. The first `accepted` of them are drafts, which the target has run.
public struct Verified: Equatable, Sendable {
    public var tokenIds: [Int]
    public var accepted: Int

    public init(tokenIds: [Int], accepted: Int) {
        self.tokenIds = tokenIds
        self.accepted = accepted
    }
}

/// Verify by float32 logits, `numRows` rows of [V]: row j is the target's after the draft's first j tokens, and there may be fewer
/// than were drafted.
///
/// The sampler's penalty sees a row's accepted drafts, and is as before at the end: the caller accepts what stays, as after
/// `Sampler.sample`. A token of `ends` is the last in any case: nothing is drawn behind it.
///
/// Drafts that were chosen, not drawn: each row is sampled as without drafts, and a draft stays where it is that token. So tokens
/// are those of plain decoding, draw for draw. Drafts drawn from q: accepted with min(1, p/q), and in place of the first rejected
/// one a token is drawn from max(0, p - q); so tokens have the target's distribution p. Throws as `Sampler.sample`.
public func verify(
    _ draft: Draft, logits: UnsafeBufferPointer<Float>, numRows: Int, _ sampler: inout Sampler, ends: Set<Int> = []
) throws(LesonnxError) -> Verified {
    let vocabSize = logits.count / numRows
    func row(_ number: Int) -> UnsafeBufferPointer<Float> {
        UnsafeBufferPointer(rebasing: logits[number * vocabSize..<(number + 1) * vocabSize])
    }
    var accepted: [Int] = []
    defer {
        for token in accepted {
            // Each was accepted below.
            try? sampler.retract(token)
        }
    }
    for (place, drafted) in draft.tokenIds.prefix(numRows - 1).enumerated() {
        let token: Int
        if let probabilities = draft.probabilities, sampler.options.temperature > 0 {
            token = acceptOrRedraw(drafted, try sampler.distribution(row(place)), probabilities[place], &sampler.random)
        } else {
            token = try sampler.sample(row(place))
        }
        if token != drafted {
            return Verified(tokenIds: accepted + [token], accepted: place)
        }
        if ends.contains(token) {
            return Verified(tokenIds: accepted + [token], accepted: place + 1)
        }
        try sampler.accept(token)
        accepted.append(token)
    }
    return Verified(tokenIds: accepted + [try sampler.sample(row(numRows - 1))], accepted: accepted.count)
}

/// The drafted token with min(1, p/q), else one of the residual, which the drafted one is not in.
private func acceptOrRedraw(_ drafted: Int, _ target: [Weighted], _ proposal: [Weighted], _ random: inout Pcg32) -> Int {
    let p = probability(of: drafted, target)
    let q = probability(of: drafted, proposal)
    if random.uniform() * q < p {
        return drafted
    }
    let taken = Dictionary(proposal.map { ($0.id, $0.weight) }, uniquingKeysWith: { first, _ in first })
    // The rejected token has p < q, so its residual is 0: it is cut off, as a last one that rounding leaves must not be it.
    var residual: [Weighted] = []
    for token in target {
        let left = token.weight - (taken[token.id] ?? 0)
        if left > 0 {
            residual.append(Weighted(id: token.id, weight: left))
        }
    }
    if residual.isEmpty {
        // p and q are the same but for rounding: one draw all the same, from p without the rejected token.
        residual = target.filter { $0.id != drafted }
    }
    return draw(residual, &random)
}

/// The token's probability; 0 where it is not there.
private func probability(of token: Int, _ distribution: [Weighted]) -> Double {
    distribution.first { $0.id == token }?.weight ?? 0
}
