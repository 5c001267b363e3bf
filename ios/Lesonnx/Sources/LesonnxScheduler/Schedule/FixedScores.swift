private let scoreBits = 20
private let scoreLimit = Double(1 << 30)

/// Router scores as the fixed point of the scheduler: 20 fractional bits, rounded half to even.
///
/// Clipped to +-2^30 (a score of +-1024); what is not a number counts as the least. The one place where a float becomes an
/// integer; done in float64, where the product is exact. Any shape, in the order given.
public func fixedScores(_ scores: UnsafeBufferPointer<Float>) -> [Int32] {
    [Int32](unsafeUninitializedCapacity: scores.count) { fixed, count in
        for i in scores.indices {
            let scaled = (Double(scores[i]) * Double(1 << scoreBits)).rounded(.toNearestOrEven)
            fixed[i] = scaled.isNaN ? -Int32(scoreLimit) : Int32(max(-scoreLimit, min(scoreLimit, scaled)))
        }
        count = scores.count
    }
}

/// The same for an array.
public func fixedScores(_ scores: [Float]) -> [Int32] {
    scores.withUnsafeBufferPointer { fixedScores($0) }
}
