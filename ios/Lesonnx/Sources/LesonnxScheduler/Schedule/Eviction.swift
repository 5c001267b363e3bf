// What an expert in memory is worth: the policies `lru`, `lfu` and `les`, in integers.
//
// A policy learns which experts the rows of each visit to a layer used, and values every expert of that layer; it knows neither
// sizes nor states. The value of an expert changes only when its own layer is visited, so the scheduler asks for one layer's
// values at a time.

let oddsBits = 14
/// Certainty, in the fixed point of all averages and odds (14 fractional bits).
let one = 1 << oddsBits

/// Of a longer chunk, only this many last rows teach: what came before has faded anyway.
let learnedRows = 64

/// Above every value that is learned: pinned experts, and what `lfu` thinks of a prediction.
let topValue = 1 << 42

/// Values are signed integers, in size at most `topValue`; the smaller is evicted first.
protocol EvictionPolicy: Sendable {
    /// Take in the experts (`expert_idx`) that these consecutive rows used at this layer.
    mutating func learn(layer: Int, rows: ArraySlice<[Int]>)

    /// Put the value of each routed expert of the layer, whose last visit had this number, into `values`.
    mutating func value(layer: Int, visit: Int, into values: UnsafeMutableBufferPointer<Int>)

    /// How likely each routed expert of the layer is used by the next row, of `one`.
    func odds(layer: Int) -> [Int]

    /// The value of an absent expert that has `odds` of `one` to be used at the layer's next `visit`; `clock` is the number
    /// of the latest visit of any layer.
    func predicted(layer: Int, odds: Int, visit: Int, clock: Int) -> Int
}

func makePolicy(_ policy: Policy, numExperts: [Int], numExpertsPerTok: [Int]) -> any EvictionPolicy {
    switch policy {
    case .lru: LruPolicy(numExperts: numExperts, numExpertsPerTok: numExpertsPerTok)
    case .lfu: LfuPolicy(numExperts: numExperts, numExpertsPerTok: numExpertsPerTok)
    case .les: LesPolicy(numExperts: numExperts, numExpertsPerTok: numExpertsPerTok)
    }
}

/// What `lru` and `lfu` share: they foretell nothing, so one expert of a layer is as likely as another.
private func evenOdds(_ numExperts: [Int], _ numExpertsPerTok: [Int]) -> [[Int]] {
    zip(numExperts, numExpertsPerTok).map { Array(repeating: one * $1 / $0, count: $0) }
}

/// The least recently used goes first: the value is the visit of the last use.
struct LruPolicy: EvictionPolicy {
    private var last: [[Int]]
    private var learned: [[Int]]
    private let even: [[Int]]

    init(numExperts: [Int], numExpertsPerTok: [Int]) {
        even = evenOdds(numExperts, numExpertsPerTok)
        last = numExperts.map { Array(repeating: 0, count: $0) }
        learned = numExperts.map { _ in [] }
    }

    mutating func learn(layer: Int, rows: ArraySlice<[Int]>) {
        for row in rows {
            learned[layer] += row
        }
    }

    mutating func value(layer: Int, visit: Int, into values: UnsafeMutableBufferPointer<Int>) {
        for expert in learned[layer] {
            last[layer][expert] = visit
        }
        learned[layer].removeAll(keepingCapacity: true)
        _ = values.update(fromContentsOf: last[layer])
    }

    func odds(layer: Int) -> [Int] { even[layer] }

    func predicted(layer: Int, odds: Int, visit: Int, clock: Int) -> Int { clock }
}

/// The least often used goes first: the value is the number of rows that used it.
struct LfuPolicy: EvictionPolicy {
    private var count: [[Int]]
    private let even: [[Int]]

    init(numExperts: [Int], numExpertsPerTok: [Int]) {
        even = evenOdds(numExperts, numExpertsPerTok)
        count = numExperts.map { Array(repeating: 0, count: $0) }
    }

    mutating func learn(layer: Int, rows: ArraySlice<[Int]>) {
        for row in rows {
            for expert in row {
                count[layer][expert] += 1
            }
        }
    }

    mutating func value(layer: Int, visit: Int, into values: UnsafeMutableBufferPointer<Int>) {
        _ = values.update(fromContentsOf: count[layer])
    }

    func odds(layer: Int) -> [Int] { even[layer] }

    func predicted(layer: Int, odds: Int, visit: Int, clock: Int) -> Int { topValue }
}

/// What is least likely to be used at its layer's next visit goes first; the farther that visit, the sooner.
///
/// value = odds of use at the next visit - price * (number of that visit), where the odds are a weighted sum of three moving
/// averages: what followed the experts used now (a mean over them), recent use, and lasting use. The number of the next visit
/// stands for its distance, since all values are compared at the same moment.
///
/// One table a layer holds the averages, [num_experts + 2, num_experts] int16 of `one`: row e what is used one row after
/// expert e is, then recent and lasting use.
struct LesPolicy: EvictionPolicy {
    private static let followerShift = Int16(3)
    private static let recentShift = Int16(1)
    private static let lastingShift = Int16(4)
    private static let followerWeight = 2
    private static let recentWeight = 1
    private static let lastingWeight = 1
    private static let totalWeight = followerWeight + recentWeight + lastingWeight
    /// Waiting one whole cycle in memory costs 1/20 of a certain use.
    private static let waitDivisor = 20

    private let numExperts: [Int]
    private let followerFactor: [Int]  // by layer: what a follower average counts in the sum
    private let scale: Int
    private let price: Int
    private var tables: [[Int16]]
    private var latest: [[Int]]  // by layer: what its last row used
    private var target: [Int16]  // of the row being learned: `one` for what it uses

    init(numExperts: [Int], numExpertsPerTok: [Int]) {
        self.numExperts = numExperts
        // Followers are a mean over k experts; multiplying by a common multiple of every k leaves no division.
        let scale = numExpertsPerTok.reduce(1, leastCommonMultiple)
        self.scale = scale
        price = max(1, Self.totalWeight * scale * one / (Self.waitDivisor * numExperts.count))
        followerFactor = numExpertsPerTok.map { Self.followerWeight * scale / $0 }
        tables = zip(numExperts, numExpertsPerTok).map { n, k in
            let averages = [Int16](repeating: 0, count: (n + 1) * n)
            let lasting = [Int16](repeating: Int16(one * k / n), count: n)
            return averages + lasting
        }
        latest = numExperts.map { _ in [] }
        target = Array(repeating: 0, count: numExperts.max() ?? 0)
    }

    mutating func learn(layer: Int, rows: ArraySlice<[Int]>) {
        let n = numExperts[layer]
        for row in rows.suffix(learnedRows) {
            for expert in row {
                target[expert] = Int16(one)
            }
            let previous = latest[layer]
            target.withUnsafeBufferPointer { target in
                tables[layer].withUnsafeMutableBufferPointer { table in
                    for expert in previous {
                        Self.move(table, row: expert, n, to: target, by: Self.followerShift)
                    }
                    Self.move(table, row: n, n, to: target, by: Self.recentShift)
                    Self.move(table, row: n + 1, n, to: target, by: Self.lastingShift)
                }
            }
            for expert in row {
                target[expert] = 0
            }
            latest[layer] = row
        }
    }

    func value(layer: Int, visit: Int, into values: UnsafeMutableBufferPointer<Int>) {
        weigh(layer, into: values)
        let cost = price * (visit + tables.count)
        for e in values.indices {
            values[e] -= cost
        }
    }

    func odds(layer: Int) -> [Int] {
        let n = numExperts[layer]
        var weighted = [Int](repeating: 0, count: n)
        weighted.withUnsafeMutableBufferPointer { weigh(layer, into: $0) }
        return weighted.map { min($0 / (Self.totalWeight * scale), one) }
    }

    /// The odds of each expert, `totalWeight * scale` times too large.
    private func weigh(_ layer: Int, into weighted: UnsafeMutableBufferPointer<Int>) {
        let n = numExperts[layer]
        let factor = followerFactor[layer]
        tables[layer].withUnsafeBufferPointer { table in
            let recent = n * n
            let lasting = recent + n
            for e in 0..<n {
                weighted[e] =
                    scale * (Self.recentWeight * Int(table[recent + e]) + Self.lastingWeight * Int(table[lasting + e]))
            }
            for expert in latest[layer] {
                let start = expert * n
                for e in 0..<n {
                    weighted[e] += factor * Int(table[start + e])
                }
            }
        }
    }

    func predicted(layer: Int, odds: Int, visit: Int, clock: Int) -> Int {
        Self.totalWeight * scale * odds - price * visit
    }

    @inline(__always)
    private static func move(
        _ table: UnsafeMutableBufferPointer<Int16>, row: Int, _ n: Int, to target: UnsafeBufferPointer<Int16>,
        by shift: Int16
    ) {
        let start = row * n
        for e in 0..<n {
            let old = table[start + e]
            table[start + e] = old &+ ((target[e] &- old) &>> shift)
        }
    }
}

func leastCommonMultiple(_ a: Int, _ b: Int) -> Int {
    var x = a
    var y = b
    while y != 0 {
        (x, y) = (y, x % y)
    }
    return a / x * b
}
