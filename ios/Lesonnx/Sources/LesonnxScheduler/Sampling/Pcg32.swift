/// PCG-XSH-RR with 64 bits of state and 32 of output: one draw, one number. Its owner alone draws.
///
/// Source: Melissa O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for Random Number
/// Generation", Harvey Mudd College HMC-CS-2014-0905; `pcg32_srandom_r` and `pcg32_random_r` of pcg-c-basic.
public struct Pcg32: Equatable, Sendable {
    /// The stream of O'Neill's demonstration program; every sampler uses it.
    public static let samplerStream: UInt64 = 54
    private static let multiplier: UInt64 = 6_364_136_223_846_793_005

    private var state: UInt64 = 0
    private let increment: UInt64

    /// Start from `seed` on one of 2^63 streams, as `pcg32_srandom_r(seed, stream)` does.
    public init(seed: UInt64, stream: UInt64 = Self.samplerStream) {
        increment = (stream << 1) | 1
        _ = nextUInt32()
        state = state &+ seed
        _ = nextUInt32()
    }

    /// The next 32 random bits.
    public mutating func nextUInt32() -> UInt32 {
        let old = state
        state = old &* Self.multiplier &+ increment
        let shifted = UInt32(truncatingIfNeeded: ((old >> 18) ^ old) >> 27)
        let rotation = UInt32(truncatingIfNeeded: old >> 59)
        return (shifted &>> rotation) | (shifted &<< ((0 &- rotation) & 31))
    }

    /// One draw as a float64 in [0, 1): a multiple of 2^-32.
    public mutating func uniform() -> Double {
        Double(nextUInt32()) * 0x1p-32
    }
}
