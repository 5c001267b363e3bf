// What the scheduler and its host say to each other: the model's shape, the switches, the actions, the counters.
// Plain values that know no state.

/// One MoE layer. `costBytes`: an expert's length in the pack, in whole pages; `sharedCostBytes` 0 for no shared expert.
public struct LayerShape: Equatable, Sendable {
    public var numExperts: Int
    public var numExpertsPerTok: Int
    public var costBytes: Int
    public var sharedCostBytes: Int

    public init(numExperts: Int, numExpertsPerTok: Int, costBytes: Int, sharedCostBytes: Int = 0) {
        self.numExperts = numExperts
        self.numExpertsPerTok = numExpertsPerTok
        self.costBytes = costBytes
        self.sharedCostBytes = sharedCostBytes
    }

    var numWithShared: Int { numExperts + (sharedCostBytes > 0 ? 1 : 0) }
}

/// How the expert that gives way is chosen.
public enum Policy: String, Equatable, Sendable, CaseIterable {
    case lru, lfu, les
}

/// Which techniques are on.
public struct SchedulerConfig: Equatable, Sendable {
    public var policy = Policy.les
    /// Loads under way at once.
    public var maxLoads = 4
    /// Compute what is ready while the rest loads.
    public var computeFirst = true
    public var lookahead = true
    /// Most speculative loads under way.
    public var lookaheadLoads = 1
    /// Most speculative bytes queued and under way; 0: eight of the largest experts.
    public var lookaheadBytes = 0
    /// Least odds, of 16384, to load a prediction.
    public var lookaheadOdds = one * 5 / 8
    /// Keep experts after use.
    public var retain = true
    /// Load every expert at the start and keep it.
    public var resident = false
    public var slabBytes = slabLimitBytes

    public init() {}

    /// One load after another when the router asks, and nothing is kept.
    public static let onDemand: SchedulerConfig = {
        var config = SchedulerConfig()
        config.policy = .lru
        config.maxLoads = 1
        config.computeFirst = false
        config.lookahead = false
        config.retain = false
        return config
    }()
}

/// What the scheduler asks of its host, to be carried out in order. `promote` and `cancel` are records for the timeline.
public enum Action: Equatable, Sendable {
    /// Read the expert to this place; report `loaded` or `loadFailed`.
    case load(expert: Int, lookahead: Bool, slab: Int, offsetBytes: Int)
    /// The expert's place is free; a load that comes later may take it.
    case evict(Int)
    /// Compute these experts, each with all its rows; report `computed` with the same.
    case compute([Int])
    /// A lookahead load, queued or under way, has become a demand load.
    case promote(Int)
    /// A lookahead load that had not started, or that failed, is dropped.
    case cancel(Int)
}

/// Totals since the start. Required experts count once a layer and step, shared ones too; bytes as loads begin.
public struct Counters: Equatable, Sendable {
    public var hits = 0
    public var late = 0
    public var misses = 0
    public var demandBytes = 0
    public var lookaheadBytes = 0
    public var lookaheadLoads = 0
    public var lookaheadUsed = 0
    public var lookaheadWasted = 0
    public var evictions = 0

    public init() {}
}

/// What is known of an expert's place in memory.
public enum ExpertState: UInt8, Equatable, Sendable {
    case absent, queued, loading, resident
}

/// Slab and byte offset of an expert in the cache.
public struct Place: Equatable, Sendable {
    public var slab: Int
    public var offsetBytes: Int

    public init(slab: Int, offsetBytes: Int) {
        self.slab = slab
        self.offsetBytes = offsetBytes
    }
}
