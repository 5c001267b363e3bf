import Foundation
import LesonnxScheduler

/// How experts get into memory.
public enum Schedule: String, Equatable, Sendable, CaseIterable {
    /// One after another when the router asks, and nothing is kept.
    case onDemand = "on-demand"
    /// Several reads at once, the least recently used expert gives way.
    case cache
    /// Lookahead expert scheduling.
    case les
    /// All in memory from the start.
    case resident
}

/// Whether the twins of dense parts run, for accelerators, which round otherwise.
public enum Acceleration: String, Equatable, Sendable, CaseIterable {
    /// Where the providers that the bundle lists are there.
    case auto
    case off
    /// On the CPU provider: slower, to try them.
    case cpu
}

/// How a bundle is run. None of these changes what the model says (`prefillChunkTokens` and `accelerate` may change rounding).
///
/// `expertBudgetBytes` bounds the expert cache, exactly. `memoryBudgetBytes` bounds the process: the experts get what runtime,
/// dense parts, attention caches and buffers leave. Without either, all experts may be in memory. `numThreads` is the process's:
/// while a model is loaded, others run on as many. `draft` names what proposes tokens, `draftModel` the folder of the bundle that
/// does for `draft-model`: with a temperature, drafts that are drawn give other tokens of the same distribution. What is nil is the schedule's, the bundle's or the machine's.
public struct LoadOptions: Equatable, Sendable {
    public var schedule = Schedule.les
    public var engine = EngineChoice.auto
    public var numLoaders: Int?
    public var policy: Policy?
    public var computeFirst: Bool?
    public var lookahead: Bool?
    public var expertBudgetBytes: Int?
    public var memoryBudgetBytes: Int?
    public var prefillChunkTokens: Int?
    public var numThreads: Int?
    public var accelerate = Acceleration.auto
    /// A folder that is this bundle's alone, where providers keep what they compile, from one start to the next; they do without it.
    public var providerCache: URL?
    public var draft = DrafterName.none
    public var draftModel: URL?

    public init() {}

    private static let defaultLoaders = 4
    private static let loadersLimit = 64
    private static let threadsLimit = 256

    /// Throws `input` for an option outside its range.
    func check() throws(LesonnxError) {
        let ranges = [
            ("numLoaders", numLoaders, Self.loadersLimit), ("numThreads", numThreads, Self.threadsLimit),
            ("prefillChunkTokens", prefillChunkTokens, Int(Int32.max)),
        ]
        for (name, value, limit) in ranges {
            if let value, !(1...limit).contains(value) {
                throw .input("\(name) is \(value), expected 1 to \(limit)")
            }
        }
        for (name, value) in [("expertBudgetBytes", expertBudgetBytes), ("memoryBudgetBytes", memoryBudgetBytes)] {
            if let value, value < 0 {
                throw .input("\(name) is \(value), expected a number of bytes")
            }
        }
        if lookahead == true && schedule == .onDemand {
            throw .input("schedule on-demand keeps nothing, so there is nothing to look ahead for")
        }
        if draft == .draftModel && draftModel == nil {
            throw .input("drafter draft-model needs the bundle that drafts: give draftModel")
        }
        if draft != .draftModel && draftModel != nil {
            throw .input("a draft model was given, but the drafter is \(draft.rawValue): expected draft-model")
        }
    }

    /// The schedule's settings with the user's changes; its `maxLoads` threads read.
    var schedulerConfig: SchedulerConfig {
        var config = schedule == .onDemand ? SchedulerConfig.onDemand : SchedulerConfig()
        switch schedule {
        case .onDemand, .les:
            break
        case .cache:
            config.policy = .lru
            config.computeFirst = false
            config.lookahead = false
        case .resident:
            config.resident = true
            config.lookahead = false
        }
        config.maxLoads = numLoaders ?? (schedule == .onDemand ? 1 : Self.defaultLoaders)
        config.policy = policy ?? config.policy
        config.computeFirst = computeFirst ?? config.computeFirst
        config.lookahead = lookahead ?? config.lookahead
        return config
    }
}
