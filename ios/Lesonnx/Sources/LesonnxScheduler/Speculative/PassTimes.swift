// How long a pass of so many rows takes: measured, fading, robust against a few slow ones. Pure integers; it knows no clock, times
// come in as microseconds. `docs/speculation.md` states the arithmetic.

/// The last few values and their median: of an even number the lower one.
private struct Recent {
    static let count = 5

    private var values: [Int] = []
    private(set) var median = 0

    /// Whether there is any.
    var isKnown: Bool { !values.isEmpty }
    /// Whether one odd value cannot sway it.
    var isSettled: Bool { values.count >= 3 }

    mutating func add(_ value: Int) {
        values = values.suffix(Self.count - 1) + [value]
        median = values.sorted()[(values.count - 1) / 2]
    }
}

/// Microseconds of a pass by its rows and by the bytes that its rows but the first are expected to add. A pass is what it computes
/// and what it waits for reads.
///
/// A pass of several rows is held as a ratio to one of a single row at that time, so what slows both down (another program, heat, a
/// longer context) leaves it right. What is known of passes bounds it: wider ones are not quicker, and as long as a width is
/// not settled, a further row does not cost more than those before it. A value, owned by `Pricing`.
struct PassTimes: Sendable {
    private static let ratioOne = 1 << 10
    /// Beyond what was measured a further row is taken to cost no less than 3/8 of a single one's pass, and 1/8 where what was measured
    /// is settled: a few quick passes of two rows do not make those of twelve free.
    private static let unknownRowEighths = 3
    private static let leastRowEighths = 1
    /// What further rows wait for the bytes that they add is begun with what so many plain passes wait for theirs.
    private static let priorPasses = 2
    /// Where passes read, so many plain ones come before anything is compared with them: a cold cache makes them wait.
    private static let warmPasses = 24
    private static let fadeShift = 5
    private static let plainFadeShift = 4
    private static let passOne = 1 << 10
    private static let mostRows = BundleManifest.rewindableTokens
    /// Beyond all that is ever measured (three days), so that products of times stay numbers.
    private static let longestUs = 1 << 38

    private var single = Recent()
    /// By rows; those of 0 and 1 stay empty.
    private var ratios = Array(repeating: Recent(), count: mostRows + 1)
    private var table = Array(repeating: ratioOne, count: mostRows + 1)
    // Fading sums over passes of one row: their number, their waiting, what they read.
    private var passes = 0
    private var numPlain = 0
    private var stallUs = 0
    private var readBytes = 0
    // And over passes of several: what they waited longer, and what their further rows were expected to add.
    private var extraStallUs = 0
    private var extraBytes = 0

    init() { tabulate() }

    /// Whether enough passes of one row were measured: without them there is nothing to compare with.
    var isKnown: Bool { single.isSettled && (readBytes == 0 || numPlain >= Self.warmPasses) }

    /// What was measured of passes of so many rows counts no more.
    mutating func forget(rows: Int) { ratios[rows] = Recent() }

    /// A pass is over. `stallUs` of it were spent waiting for reads; `readBytes` were read meanwhile. `newBytes`: what each row was
    /// expected to add, the first one's own first; used of passes of several rows.
    mutating func took(rows: Int, passUs: Int, stallUs: Int, readBytes: Int, newBytes: [Int]) {
        let computeUs = max(1, passUs - stallUs)
        if rows == 1 {
            single.add(computeUs)
            numPlain = min(numPlain + 1, Self.warmPasses)
            passes += Self.passOne - (passes >> Self.plainFadeShift)
            self.stallUs += stallUs - (self.stallUs >> Self.plainFadeShift)
            self.readBytes += readBytes - (self.readBytes >> Self.plainFadeShift)
            return
        }
        if !isKnown {
            return
        }
        ratios[rows].add(max(Self.ratioOne, computeUs * Self.ratioOne / single.median))
        tabulate()
        extraStallUs += stallUs - meanStallUs - (extraStallUs >> Self.fadeShift)
        extraBytes += newBytes.prefix(rows).dropFirst().reduce(0, +) - (extraBytes >> Self.fadeShift)
    }

    /// What a pass of `rows` is expected to take if its rows but the first add `extraBytes`.
    func passUs(rows: Int, extraBytes: Int = 0) -> Int {
        let computeUs = single.median * table[rows] / Self.ratioOne
        let waited = max(0, Self.priorPasses * meanStallUs + extraStallUs)
        let (high, low) = UInt(extraBytes).multipliedFullWidth(by: UInt(waited))
        let read = UInt(max(1, Self.priorPasses * meanReadBytes + self.extraBytes))
        let extraUs = high < read ? min(read.dividingFullWidth((high, low)).quotient, UInt(Self.longestUs)) : UInt(Self.longestUs)
        return computeUs + meanStallUs + Int(extraUs)
    }

    /// What a pass of one row waits.
    private var meanStallUs: Int { stallUs * Self.passOne / max(1, passes) }
    /// What a pass of one row reads.
    private var meanReadBytes: Int { readBytes * Self.passOne / max(1, passes) }

    /// By rows, a pass of so many by one of a single row: measured, or between measured ones; within bounds.
    private mutating func tabulate() {
        for rows in 2...Self.mostRows {
            var ratio = measured(rows)
            for width in 2...Self.mostRows where width != rows && ratios[width].isSettled {
                if width > rows {
                    ratio = min(ratio, ratios[width].median)
                } else if !ratios[rows].isSettled {
                    ratio = min(ratio, beyond(rows, through: width))
                }
            }
            table[rows] = ratio
        }
    }

    /// The ratio that was measured, or that on the line through measured neighbours.
    private func measured(_ rows: Int) -> Int {
        if ratios[rows].isKnown {
            return ratios[rows].median
        }
        let known = ratios.indices.filter { ratios[$0].isKnown }
        let below = known.last { $0 < rows } ?? 1
        guard let above = known.first(where: { $0 > rows }) else {
            return beyond(rows, through: below)
        }
        let low = below > 1 ? ratios[below].median : Self.ratioOne
        return low + floorDivide((ratios[above].median - low) * (rows - below), by: above - below)
    }

    /// The ratio on the line from the single row through a narrower width, where further rows cost something.
    private func beyond(_ rows: Int, through width: Int) -> Int {
        if width == 1 {
            return Self.ratioOne + Self.ratioOne * (rows - 1) * Self.unknownRowEighths / 8
        }
        let recent = ratios[width]
        let least = recent.isSettled ? Self.leastRowEighths : Self.unknownRowEighths
        let line = (recent.median - Self.ratioOne) * (rows - width) / (width - 1)
        return recent.median + max(line, Self.ratioOne * (rows - width) * least / 8)
    }
}

/// The quotient rounded down, also of a negative number; `divisor` is positive.
private func floorDivide(_ value: Int, by divisor: Int) -> Int {
    let (quotient, remainder) = value.quotientAndRemainder(dividingBy: divisor)
    return remainder < 0 ? quotient - 1 : quotient
}
