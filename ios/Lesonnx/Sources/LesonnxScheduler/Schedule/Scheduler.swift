// The expert scheduler: events in, actions out. What to load, where to, what to evict, what to compute when.
//
// It knows no threads, clock, files or ONNX Runtime; the host carries actions out and reports events. Everything is integers and
// every tie is broken by index: `docs/scheduler.md` says how, the golden traces hold it there.

/// The state machine, a value. Experts are numbered layer by layer: its routed experts, then its shared one.
///
/// A step is `beginStep`, then for each layer in order `route`, (`loaded` and `computed` as they come, until all required
/// experts are computed), `endLayer`. `predict` may come at any time but for the open layer, `accept` after the last layer,
/// `pressure` best between steps. Each returns the actions it causes, in order, and throws `schedule` for an event that cannot
/// happen, changing nothing. One thread at a time.
public struct Scheduler: Sendable {
    public let config: SchedulerConfig
    public let layers: [LayerShape]
    public private(set) var counters = Counters()
    /// The layer between `route` and `endLayer`.
    public private(set) var openLayer: Int?

    private(set) var residency: Residency
    private var lookahead: Lookahead
    private let lookaheadCap: Int
    private var states: [ExpertState]
    private var clock = 0  // layer visits so far
    private var lastVisit: [Int]
    private var rows = 0
    private var drafts = 0
    private var draftRows: [[[Int]]]  // by layer: what the rows used that may be rejected
    private var isRequired: [Bool]  // by the open layer, and not yet computed
    private var numRequired = 0
    private var isComputing: [Bool]
    private var numComputing = 0
    private var ready: [Int] = []  // resident, required, not given out to compute
    private var demand: [Int] = []  // queued, in the order of loading
    private var wanted: [Int] = []  // queued for lookahead, nearest layer first, then best rank; in the order of loading
    private var speculative: [[Int]]  // by layer, ascending: loaded or loading ahead of the layer's visit
    private var isSpeculativeLoad: [Bool]  // being loaded, for lookahead, and not promoted
    private var beside: [Bool?]  // demand load: a speculative load was under way when it began
    private var numLoading = 0
    private var speculativeLoads = 0
    private var speculativeBytes = 0  // queued and loading
    private var failures: Set<Int> = []
    private var preload: Int
    private var isUsed: [Bool]  // scratch of `route`, all false between calls: `expert_idx` that a row names

    /// Throws `budget` for a budget below the largest layer's experts of one row, or where all are to be resident, below all.
    public init(layers: [LayerShape], budgetBytes: Int, config: SchedulerConfig = SchedulerConfig()) throws(LesonnxError) {
        if (config.resident || config.lookahead) && !config.retain {
            throw .input("resident experts and lookahead need retain")
        }
        if layers.isEmpty || layers.contains(where: { !(1...$0.numExperts).contains($0.numExpertsPerTok) }) {
            throw .input("every MoE layer needs experts, and at least one of them a token")
        }
        self.config = config
        self.layers = layers
        try Self.check(budgetBytes: budgetBytes, layers: layers)
        let total = layers.reduce(0) { $0 + $1.numExperts * $1.costBytes + $1.sharedCostBytes }
        if config.resident && budgetBytes < total {
            throw .budget("expert budget of \(budgetBytes) bytes: all experts in memory need \(total)")
        }
        residency = try Residency(
            layers: layers, budgetBytes: budgetBytes, policy: config.policy, slabBytes: config.slabBytes)
        lookahead = Lookahead(
            numExperts: layers.map(\.numExperts), numExpertsPerTok: layers.map(\.numExpertsPerTok))
        let largest = layers.map(\.costBytes).max() ?? 0
        lookaheadCap = config.lookaheadBytes > 0 ? config.lookaheadBytes : 8 * largest
        let count = residency.cost.count
        states = Array(repeating: .absent, count: count)
        lastVisit = layers.indices.map { $0 + 1 - layers.count }  // as if a cycle had just ended
        draftRows = layers.map { _ in [] }
        isRequired = Array(repeating: false, count: count)
        isComputing = isRequired
        isSpeculativeLoad = isRequired
        speculative = layers.map { _ in [] }
        beside = Array(repeating: nil, count: count)
        preload = config.resident ? 0 : count
        isUsed = Array(repeating: false, count: layers.map(\.numExperts).max() ?? 0)
    }

    // MARK: what a host may ask

    /// Each layer's first expert.
    public var first: [Int] { residency.first }

    /// Experts of all layers together.
    public var numExperts: Int { states.count }

    /// How far speculation is turned up, 0 to 64.
    public var lookaheadLevel: Int { lookahead.level }

    /// The cache's buffers by number; lengths shrink and return with `pressure`.
    public func slabs() -> [Slab] { residency.slabs() }

    /// What the slots in force take, and those given up whose expert is still needed; at most the budget once nothing is
    /// required and nothing is loading.
    public func committedBytes() -> Int { residency.committedBytes() }

    public func state(of expert: Int) -> ExpertState { states[expert] }

    /// Where a loading or resident expert lies; nil for any other.
    public func place(of expert: Int) -> Place? {
        states[expert] == .loading || states[expert] == .resident ? residency.place(of: expert) : nil
    }

    /// The MoE layer that an expert belongs to.
    public func layer(of expert: Int) -> Int { residency.layerOf[expert] }

    /// For each of the next step's `rows` the bytes that it is expected to add to what must be loaded.
    public func expectedNewBytes(rows: Int) -> [Int] {
        residency.expectedNewBytes(rows: rows, isAbsent: states.map { $0 != .resident })
    }

    // MARK: events

    /// A step of `rows` tokens begins, the last `drafts` of which may be rejected (see `accept`).
    public mutating func beginStep(rows: Int, drafts: Int = 0) throws(LesonnxError) -> [Action] {
        if let openLayer {
            throw .schedule("beginStep while layer \(openLayer) is open")
        }
        if drafts < 0 || drafts >= rows {
            throw .schedule("beginStep of \(rows) rows with \(drafts) drafts")
        }
        self.rows = rows
        self.drafts = drafts
        for layer in draftRows.indices where !draftRows[layer].isEmpty {
            draftRows[layer].removeAll()
        }
        var actions: [Action] = []
        advance(&actions)
        return actions
    }

    /// The router's choice: for each row (the last rows of the step, where a layer computes fewer) its experts
    /// (`expert_idx`), strongest first.
    public mutating func route(layer: Int, expertIds: [[Int]]) throws(LesonnxError) -> [Action] {
        if openLayer != nil || expertIds.isEmpty || expertIds.count > rows || !layers.indices.contains(layer) {
            let open = openLayer.map { "layer \($0) is open" } ?? "no layer is open"
            throw .schedule("route of layer \(layer): \(expertIds.count) rows of \(rows), \(open)")
        }
        let shape = layers[layer]
        try check(expertIds, of: layer)
        for row in expertIds {
            for expert in row {
                isUsed[expert] = true
            }
        }
        // One row keeps the router's order, strongest first; several load in the order of the pack.
        let used = expertIds.count == 1 ? expertIds[0] : (0..<shape.numExperts).filter { isUsed[$0] }
        defer {
            for expert in used {
                isUsed[expert] = false
            }
        }
        let start = residency.first[layer]
        var chosen = used.map { start + $0 }
        if shape.sharedCostBytes > 0 {
            chosen.append(start + shape.numExperts)
        }
        for expert in chosen {
            isRequired[expert] = true
        }
        numRequired = chosen.count
        openLayer = layer
        clock += 1
        lastVisit[layer] = clock
        let certain = max(0, expertIds.count - drafts)
        if drafts > 0 {
            draftRows[layer] = Array(expertIds[certain...])
        }
        if certain > 0 {
            residency.policy.learn(layer: layer, rows: expertIds[..<certain])
        }
        residency.revalue(layer: layer, visit: clock, isPinned: isRequired)

        var actions: [Action] = []
        if config.lookahead {
            lookahead.observe(layer: layer, isUsed: isUsed)
            settleSpeculation(layer, &actions)
        }
        for expert in chosen {
            switch states[expert] {
            case .resident:
                counters.hits += 1
                ready.append(expert)
            case .loading:
                counters.late += 1
                if isSpeculativeLoad[expert] {
                    noLongerSpeculative(expert)
                    actions.append(.promote(expert))
                }
            case .absent, .queued:
                counters.misses += 1
                states[expert] = .queued
                demand.append(expert)
            }
        }
        advance(&actions)
        return actions
    }

    /// Fixed-point router scores [T,E], flat (see `fixedScores`), for the layer's next visit; they replace the last.
    public mutating func predict(layer: Int, scores: [Int32]) throws(LesonnxError) -> [Action] {
        if layer == openLayer || !layers.indices.contains(layer) {
            throw .schedule("predict for layer \(layer) while layer \(openLayer.map(String.init) ?? "none") is open")
        }
        if scores.isEmpty || scores.count % layers[layer].numExperts != 0 {
            throw .schedule("predict for layer \(layer): \(scores.count) scores for \(layers[layer].numExperts) experts")
        }
        if !config.lookahead {
            return []
        }
        let old = wanted.isEmpty ? [] : wanted.filter { residency.layerOf[$0] == layer }
        for expert in old {
            unqueue(expert)
        }
        let new = admit(layer, scores)
        var actions: [Action] = []
        for expert in old where states[expert] == .absent {
            actions.append(.cancel(expert))
        }
        if new.isEmpty {
            return actions
        }
        let visit = nextVisit(layer)
        let place = wanted.firstIndex { nextVisit(residency.layerOf[$0]) > visit } ?? wanted.count
        wanted.insert(contentsOf: new, at: place)
        advance(&actions)
        return actions
    }

    /// The expert is in its place; reading it took `readUs` microseconds.
    public mutating func loaded(_ expert: Int, readUs: Int) throws(LesonnxError) -> [Action] {
        _ = try endLoad(expert)
        states[expert] = .resident
        if !failures.isEmpty {
            failures.remove(expert)
        }
        if let wasBeside = beside[expert] {
            beside[expert] = nil
            lookahead.demandRead(costBytes: residency.cost[expert], readUs: readUs, beside: wasBeside)
        }
        var actions: [Action] = []
        if isRequired[expert] {
            ready.append(expert)
        } else {
            letGo(expert, &actions)
        }
        advance(&actions)
        return actions
    }

    /// The read failed. A required expert is read once more, to the same place; a mere prediction is dropped.
    ///
    /// Throws `load` when an expert fails for the second time in a row.
    public mutating func loadFailed(_ expert: Int) throws(LesonnxError) -> [Action] {
        let wasSpeculative = try endLoad(expert)
        beside[expert] = nil  // a read that was repeated says nothing of speed
        if wasSpeculative {
            free(expert)
            var actions = [Action.cancel(expert)]
            advance(&actions)
            return actions
        }
        if failures.contains(expert) {
            free(expert)
            let layer = residency.layerOf[expert]
            throw .load("expert \(expert - residency.first[layer]) of MoE layer \(layer) could not be read, twice")
        }
        failures.insert(expert)
        numLoading += 1
        let place = residency.place(of: expert)
        return [.load(expert: expert, lookahead: false, slab: place.slab, offsetBytes: place.offsetBytes)]
    }

    /// These experts' rows are written: they are no longer required. All of a batch, or part by part.
    public mutating func computed(_ experts: [Int]) throws(LesonnxError) -> [Action] {
        if let other = experts.first(where: { !isComputing.indices.contains($0) || !isComputing[$0] }) {
            throw .schedule("computed \(experts): \(other) is not being computed")
        }
        for expert in experts where isComputing[expert] {
            isComputing[expert] = false
            numComputing -= 1
            isRequired[expert] = false
            numRequired -= 1
        }
        var actions: [Action] = []
        for expert in experts {
            letGo(expert, &actions)
        }
        advance(&actions)
        return actions
    }

    /// The open layer is done.
    public mutating func endLayer() throws(LesonnxError) -> [Action] {
        if openLayer == nil || numRequired > 0 {
            throw .schedule("endLayer of layer \(openLayer ?? -1) while \(numRequired) experts are required")
        }
        openLayer = nil
        return []
    }

    /// Of the step's rows these stay (ascending); what only rejected drafts used teaches the policy nothing.
    public mutating func accept(rows kept: [Int]) throws(LesonnxError) -> [Action] {
        if openLayer != nil || kept.contains(where: { $0 < 0 || $0 >= rows }) {
            throw .schedule("accept of rows \(kept) of \(rows) while layer \(openLayer ?? -1) is open")
        }
        for layer in draftRows.indices where !draftRows[layer].isEmpty {
            let before = rows - draftRows[layer].count
            let stay = kept.filter { $0 >= before }.map { draftRows[layer][$0 - before] }
            if !stay.isEmpty {
                residency.policy.learn(layer: layer, rows: stay[...])
                residency.revalue(layer: layer, visit: lastVisit[layer], isPinned: isRequired)
            }
            draftRows[layer].removeAll()
        }
        return []
    }

    /// A new budget, at most the first one: experts beyond it are evicted, those still needed as soon as possible.
    ///
    /// Throws `budget` for a budget below the largest layer's experts of one row, changing nothing.
    public mutating func pressure(budgetBytes: Int) throws(LesonnxError) -> [Action] {
        try Self.check(budgetBytes: budgetBytes, layers: layers)
        var actions: [Action] = []
        for expert in try residency.resize(budgetBytes: budgetBytes) {
            evict(expert, &actions)
        }
        advance(&actions)
        return actions
    }

    // MARK: loads

    /// Start what may start, then give out what is ready; the common end of every event.
    private mutating func advance(_ actions: inout [Action]) {
        startLoads(&actions)
        if !ready.isEmpty && numComputing == 0
            && (config.computeFirst || ready.count == numRequired || numLoading == 0)
        {
            for expert in ready {
                isComputing[expert] = true
            }
            numComputing = ready.count
            actions.append(.compute(ready))
            ready = []
        }
    }

    private mutating func startLoads(_ actions: inout [Action]) {
        while numLoading < config.maxLoads {
            if let expert = demand.first {
                if !start(expert, worth: noEntry, isSpeculative: false, &actions) {
                    return  // everything in memory is required: wait until some of it is computed
                }
                demand.removeFirst()
            } else if let expert = wanted.first, speculativeLoads < config.lookaheadLoads {
                // Strictly more in value: a prediction must not push out its equal, loaded a moment ago.
                if start(expert, worth: residency.entry[expert] & ~indexMask, isSpeculative: true, &actions) {
                    wanted.removeFirst()
                } else {
                    unqueue(expert)
                    actions.append(.cancel(expert))
                }
            } else if preload < states.count {
                let expert = preload
                preload += 1
                if states[expert] == .absent {
                    _ = start(expert, worth: noEntry, isSpeculative: false, &actions)
                }
            } else {
                return
            }
        }
    }

    /// Load the expert if there is a free slot, or one whose expert's entry is below `worth`.
    private mutating func start(_ expert: Int, worth: Int, isSpeculative: Bool, _ actions: inout [Action]) -> Bool {
        let victim = residency.worst(for: expert)
        if victim >= worth {
            return false
        }
        if victim > freeSlot {
            evict(victim & indexMask, &actions)
        }
        let place = residency.take(expert)
        states[expert] = .loading
        numLoading += 1
        isSpeculativeLoad[expert] = isSpeculative
        if isSpeculative {
            speculativeLoads += 1
            let layer = residency.layerOf[expert]
            let at = speculative[layer].firstIndex { $0 > expert } ?? speculative[layer].count
            speculative[layer].insert(expert, at: at)
            counters.lookaheadLoads += 1
            counters.lookaheadBytes += residency.cost[expert]
        } else {
            counters.demandBytes += residency.cost[expert]
            beside[expert] = speculativeLoads > 0
        }
        actions.append(
            .load(expert: expert, lookahead: isSpeculative, slab: place.slab, offsetBytes: place.offsetBytes))
        return true
    }

    /// Take the expert off the loads under way; whether it is a lookahead load.
    private mutating func endLoad(_ expert: Int) throws(LesonnxError) -> Bool {
        if !states.indices.contains(expert) || states[expert] != .loading {
            throw .schedule("expert \(expert) is not being loaded")
        }
        numLoading -= 1
        let wasSpeculative = isSpeculativeLoad[expert]
        if wasSpeculative {
            noLongerSpeculative(expert)
        }
        return wasSpeculative
    }

    private mutating func noLongerSpeculative(_ expert: Int) {
        isSpeculativeLoad[expert] = false
        speculativeLoads -= 1
        speculativeBytes -= residency.cost[expert]
    }

    // MARK: lookahead

    /// Queue those predicted experts that are absent, likely, within the cap and worth more than their victim.
    private mutating func admit(_ layer: Int, _ scores: [Int32]) -> [Int] {
        let start = residency.first[layer]
        // The odds are those of experts that need a load: what is in memory is there because it is used often.
        let absent = lookahead.rank(layer: layer, scores: scores).filter {
            states[start + $0.expert] != .resident || speculative[layer].contains(start + $0.expert)
        }
        let odds = lookahead.note(layer: layer, absent: absent)
        var admitted: [Int] = []
        var victim = noEntry
        for ranked in absent {
            let expert = start + ranked.expert
            if odds[ranked.rank] < config.lookaheadOdds || states[expert] != .absent {
                continue
            }
            if speculativeBytes + residency.cost[expert] > lookaheadCap * lookahead.level / Lookahead.full {
                break
            }
            if admitted.isEmpty {
                victim = residency.worst(for: expert)
            }
            let value = residency.policy.predicted(
                layer: layer, odds: odds[ranked.rank], visit: nextVisit(layer), clock: clock)
            if victim < value << indexBits {
                states[expert] = .queued
                residency.entry[expert] = value << indexBits | expert
                speculativeBytes += residency.cost[expert]
                admitted.append(expert)
            }
        }
        return admitted
    }

    private mutating func unqueue(_ expert: Int) {
        if let at = wanted.firstIndex(of: expert) {
            wanted.remove(at: at)
        }
        states[expert] = .absent
        speculativeBytes -= residency.cost[expert]
    }

    /// The layer's router has spoken: promote or cancel what is queued, and judge what was loaded ahead.
    private mutating func settleSpeculation(_ layer: Int, _ actions: inout [Action]) {
        for expert in wanted.filter({ residency.layerOf[$0] == layer }) {
            unqueue(expert)
            actions.append(isRequired[expert] ? .promote(expert) : .cancel(expert))
        }
        for expert in speculative[layer] {
            judge(isUseful: isRequired[expert])
        }
        speculative[layer].removeAll(keepingCapacity: true)
    }

    private mutating func judge(isUseful: Bool) {
        lookahead.outcome(isUseful: isUseful)
        if isUseful {
            counters.lookaheadUsed += 1
        } else {
            counters.lookaheadWasted += 1
        }
    }

    private func nextVisit(_ layer: Int) -> Int { lastVisit[layer] + layers.count }

    // MARK: what is in memory

    /// A resident expert is not required (any more): it may be evicted, at once where it is not to be kept.
    private mutating func letGo(_ expert: Int, _ actions: inout [Action]) {
        if config.retain && !residency.isRetired(expert) {
            residency.offer(expert)
        } else {
            drop(expert, &actions)
        }
    }

    private mutating func evict(_ expert: Int, _ actions: inout [Action]) {
        residency.withdraw(expert)
        drop(expert, &actions)
    }

    private mutating func drop(_ expert: Int, _ actions: inout [Action]) {
        counters.evictions += 1
        free(expert)
        actions.append(.evict(expert))
    }

    /// Give up the expert's slot; a load ahead that is given up before its layer came was wasted.
    private mutating func free(_ expert: Int) {
        residency.release(expert)
        states[expert] = .absent
        let layer = residency.layerOf[expert]
        if let at = speculative[layer].firstIndex(of: expert) {
            speculative[layer].remove(at: at)
            judge(isUseful: false)
        }
    }

    // MARK: checks

    private func check(_ expertIds: [[Int]], of layer: Int) throws(LesonnxError) {
        let shape = layers[layer]
        var longest = 0
        for row in expertIds {
            longest = max(longest, row.count)
            for (place, expert) in row.enumerated() {
                if expert < 0 || expert >= shape.numExperts || row[..<place].contains(expert) {
                    throw .schedule("route of layer \(layer): a row names \(row), expected experts below \(shape.numExperts), each once")
                }
            }
        }
        if longest < 1 || longest > shape.numExpertsPerTok {
            throw .schedule("route of layer \(layer): a row names \(longest) experts, expected up to \(shape.numExpertsPerTok)")
        }
    }

    private static func check(budgetBytes: Int, layers: [LayerShape]) throws(LesonnxError) {
        let least = layers.map { $0.numExpertsPerTok * $0.costBytes + $0.sharedCostBytes }.max() ?? 0
        if budgetBytes < least {
            throw .budget("expert budget of \(budgetBytes) bytes: at least \(least) are needed")
        }
    }
}
