/// Counts and times since the bundle was loaded or the last reset. Loads are counted as they end, hits, late and misses a layer
/// and step. `lookaheadMs` is what the computing thread waited for predictions.
public struct Telemetry: Equatable, Sendable {
    public var loads = 0
    public var hits = 0
    public var late = 0
    public var misses = 0
    public var readBytes = 0
    public var lookaheadLoads = 0
    public var lookaheadUsed = 0
    public var lookaheadWasted = 0
    public var readMs = 0.0
    public var stallMs = 0.0
    public var expertMs = 0.0
    public var lookaheadMs = 0.0
    public var scheduleMs = 0.0
    public var denseMs = 0.0

    public init() {}
}

/// Seconds by a clock that never goes back.
func secondsNow() -> Double {
    let (seconds, attoseconds) = (ContinuousClock.now - clockStart).components
    return Double(seconds) + Double(attoseconds) * 1e-18
}

private let clockStart = ContinuousClock.now
