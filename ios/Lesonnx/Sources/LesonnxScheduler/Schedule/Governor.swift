/// Whether looking ahead pays here and now: tried against going without, by the clock, again and again.
///
/// A prediction costs processor time; where cores are busy or reads are quick it can cost more than the waiting it hides. It
/// knows steps and their times, not what a prediction is. Tokens do not depend on it. Owned by one runner.
///
/// A round is `trialSteps` steps with and as many without, in turns, since a cache that warms up makes each step faster than
/// the one before; then `holdSteps` with what was faster.
public struct Governor: Sendable {
    // Steps of each side of a trial, and how long its outcome holds. A side that loses by 12 % costs 1.3 % in all.
    static let trialSteps = 8
    static let holdSteps = 128
    // The side in force stays unless the other is this much faster: medians of a few steps are rough.
    static let margin = 0.02

    public private(set) var isOn = true
    private var step = 0
    private var with: [Double] = []
    private var without: [Double] = []

    public init() {}

    /// Whether the coming step should look ahead.
    public func wants() -> Bool {
        step < 2 * Self.trialSteps ? step % 2 == 0 : isOn
    }

    /// The step that `wants` spoke of took that long.
    public mutating func took(seconds: Double) {
        if step < 2 * Self.trialSteps {
            if wants() {
                with.append(seconds)
            } else {
                without.append(seconds)
            }
        }
        step += 1
        if step == 2 * Self.trialSteps {
            decide()
        } else if step == 2 * Self.trialSteps + Self.holdSteps {
            step = 0
        }
    }

    private mutating func decide() {
        let (mine, other) = isOn ? (median(with), median(without)) : (median(without), median(with))
        if other < mine * (1 - Self.margin) {
            isOn.toggle()
        }
        with.removeAll()
        without.removeAll()
    }
}

/// The middle of the values, or the mean of the two in the middle; 0 of none.
func median(_ values: [Double]) -> Double {
    let sorted = values.sorted()
    if sorted.isEmpty {
        return 0
    }
    let middle = sorted.count / 2
    return sorted.count % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2
}
