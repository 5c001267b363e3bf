// Which expert lies in which slot, and which of those that may be evicted is worth least. It knows no loads, steps or
// predictions.

// An entry orders experts by value, then by number: `value << indexBits | expert`.
let indexBits = 20
let indexMask = (1 << indexBits) - 1
/// Above every entry: nothing may be evicted.
let noEntry = Int.max
/// Below every entry: a slot is free.
let freeSlot = -Int.max

/// Slots and values of all experts; experts are numbered layer by layer, a layer's shared one last. Owned by the scheduler.
///
/// A value changes only when its layer is visited, so each layer keeps its evictable experts in ascending order, and the worst
/// of all is the least of the layers' firsts: no search through the cache.
struct Residency: Sendable {
    private(set) var cost: [Int] = []
    private(set) var layerOf: [Int] = []
    private(set) var first: [Int] = []
    var policy: any EvictionPolicy
    /// Each expert's entry when its layer was last valued; that of a shared expert is above all others.
    var entry: [Int]
    private let numExperts: [Int]
    private let classOf: [Int]
    private let numClasses: Int
    private var slots: SlotAllocator
    private var slot: [Int]  // by expert; -1: none
    // By slot class and layer, at `class * layers + layer`: entries that may be evicted, ascending; and their first.
    private var evictable: [[Int]]
    private var firstEntry: [Int]
    private var values: [Int]  // of the layer being valued

    init(layers: [LayerShape], budgetBytes: Int, policy: Policy, slabBytes: Int) throws(LesonnxError) {
        for (layer, shape) in layers.enumerated() {
            first.append(cost.count)
            cost += Array(repeating: shape.costBytes, count: shape.numExperts)
            if shape.sharedCostBytes > 0 {
                cost.append(shape.sharedCostBytes)
            }
            layerOf += Array(repeating: layer, count: shape.numWithShared)
        }
        if cost.isEmpty || cost.count > indexMask {
            throw .schedule("\(cost.count) experts: expected 1 to \(indexMask)")
        }
        let sizes = Set(cost).sorted()
        let classNumber = Dictionary(uniqueKeysWithValues: sizes.enumerated().map { ($1, $0) })
        classOf = cost.map { classNumber[$0]! }
        numClasses = sizes.count
        let classes = sizes.map { size in
            SizeClass(
                slotBytes: size,
                routed: layers.reduce(0) { $0 + ($1.costBytes == size ? $1.numExperts : 0) },
                pinned: layers.count { $0.sharedCostBytes == size })
        }
        let perTok = layers.map(\.numExpertsPerTok)
        numExperts = layers.map(\.numExperts)
        slots = try SlotAllocator(
            classes: classes, atOnce: perTok.max() ?? 1, budgetBytes: budgetBytes, slabBytes: slabBytes)
        self.policy = makePolicy(policy, numExperts: numExperts, numExpertsPerTok: perTok)
        entry = Array(cost.indices)
        for (layer, shape) in layers.enumerated() where shape.sharedCostBytes > 0 {
            let shared = first[layer] + shape.numExperts
            entry[shared] = topValue << indexBits | shared
        }
        slot = Array(repeating: -1, count: cost.count)
        evictable = Array(repeating: [], count: sizes.count * layers.count)
        firstEntry = Array(repeating: noEntry, count: sizes.count * layers.count)
        values = Array(repeating: 0, count: numExperts.max() ?? 0)
    }

    // MARK: values

    /// The layer was visited: take the policy's values and order its evictable experts, leaving out those that `isPinned`
    /// marks.
    mutating func revalue(layer: Int, visit: Int, isPinned: [Bool]) {
        let start = first[layer]
        let n = numExperts[layer]
        values.withUnsafeMutableBufferPointer { values in
            policy.value(layer: layer, visit: visit, into: UnsafeMutableBufferPointer(rebasing: values[0..<n]))
            for e in 0..<n {
                entry[start + e] = values[e] << indexBits + (start + e)
            }
        }
        for sizeClass in 0..<numClasses {
            let at = sizeClass * first.count + layer
            if evictable[at].isEmpty {
                continue
            }
            var kept = 0
            for i in evictable[at].indices {
                let expert = evictable[at][i] & indexMask
                if !isPinned[expert] {
                    evictable[at][kept] = entry[expert]
                    kept += 1
                }
            }
            evictable[at].removeSubrange(kept...)
            evictable[at].sort()
            firstEntry[at] = evictable[at].first ?? noEntry
        }
    }

    /// The least entry of evictable experts whose slots hold `expert`; `freeSlot` if a slot is free, `noEntry` for none.
    func worst(for expert: Int) -> Int {
        let sizeClass = classOf[expert]
        if slots.hasFree(sizeClass) {
            return freeSlot
        }
        var least = noEntry
        for i in (sizeClass * first.count)..<firstEntry.count {
            least = min(least, firstEntry[i])
        }
        return least
    }

    /// From here on this expert may be evicted.
    mutating func offer(_ expert: Int) {
        let at = slots.classOf[slot[expert]] * first.count + layerOf[expert]
        let place = insertionPoint(of: entry[expert], in: at)
        evictable[at].insert(entry[expert], at: place)
        firstEntry[at] = evictable[at][0]
    }

    /// This expert may not be evicted any more, or is about to be.
    mutating func withdraw(_ expert: Int) {
        let at = slots.classOf[slot[expert]] * first.count + layerOf[expert]
        evictable[at].remove(at: insertionPoint(of: entry[expert], in: at))
        firstEntry[at] = evictable[at].first ?? noEntry
    }

    /// How many of the entries there are less.
    private func insertionPoint(of entry: Int, in at: Int) -> Int {
        var low = 0
        var high = evictable[at].count
        while low < high {
            let middle = (low + high) / 2
            if evictable[at][middle] < entry {
                low = middle + 1
            } else {
                high = middle
            }
        }
        return low
    }

    /// For each of the coming rows the bytes of experts that `isAbsent` marks and that it is the first to use, as far as odds tell.
    ///
    /// A row uses each expert with the policy's odds, whatever other rows use; shared experts, which all rows use, are left out.
    func expectedNewBytes(rows: Int, isAbsent: [Bool]) -> [Int] {
        var costs: [Int] = []
        var odds: [Int] = []
        for layer in first.indices {
            for (expert, share) in zip(first[layer]..., policy.odds(layer: layer)) where isAbsent[expert] {
                costs.append(cost[expert])
                odds.append(share)
            }
        }
        var firstUse = odds
        return (0..<rows).map { _ in
            var bytes = 0
            for place in costs.indices {
                bytes += costs[place] * firstUse[place]
                firstUse[place] = (firstUse[place] * (one - odds[place])) >> oddsBits
            }
            return bytes >> oddsBits
        }
    }

    // MARK: places

    /// Give the expert a free slot, which there must be.
    mutating func take(_ expert: Int) -> Place {
        guard let taken = slots.take(classOf[expert]) else {
            preconditionFailure("no free slot: the caller looked for one")
        }
        slot[expert] = taken
        return slots.place[taken]
    }

    mutating func release(_ expert: Int) {
        slots.release(slot[expert])
        slot[expert] = -1
    }

    func place(of expert: Int) -> Place { slots.place[slot[expert]] }

    /// Whether a smaller budget has taken the expert's slot away.
    func isRetired(_ expert: Int) -> Bool { slots.isRetired(slot[expert]) }

    /// Plan the slots for another budget; gives the evictable experts that lie beyond it, ascending.
    mutating func resize(budgetBytes: Int) throws(LesonnxError) -> [Int] {
        let beyond = Set(try slots.resize(budgetBytes: budgetBytes))
        return evictable.joined().map { $0 & indexMask }.filter { beyond.contains(slot[$0]) }.sorted()
    }

    func slabs() -> [Slab] { slots.slabs() }

    func committedBytes() -> Int { slots.committedBytes() }
}
