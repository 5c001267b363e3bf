// Where experts lie in the cache: slabs cut into slots, planned once from the budget. It knows no experts, only sizes: an
// expert takes one slot of its own size or a larger one. Pure integer arithmetic.

public let pageBytes = 4096
/// The longest slab, as on hosts whose buffers end below 2 GiB.
public let slabLimitBytes = 1 << 30

/// Experts of one size. `slotBytes` is a whole number of pages; `routed` and `pinned` count experts.
struct SizeClass: Equatable, Sendable {
    var slotBytes: Int
    var routed: Int
    var pinned: Int
}

/// One buffer of the cache: its `lengthBytes` now, cut into slots of `slotBytes`.
public struct Slab: Equatable, Sendable {
    public var lengthBytes: Int
    public var slotBytes: Int

    public init(lengthBytes: Int, slotBytes: Int) {
        self.lengthBytes = lengthBytes
        self.slotBytes = slotBytes
    }
}

/// How many slots each class gets; together they never exceed `budgetBytes`.
///
/// `classes` ascend by size; `atOnce` is the most routed experts that one row of a layer requires. Pinned experts get a slot
/// each (one a class where the budget is too small), the largest routed class gets `atOnce`, and the rest is shared out in
/// proportion to the bytes of the experts without a slot; what rounding leaves goes to the largest class first, since its
/// slots serve all. A budget too small for even that becomes slots of the largest size.
///
/// Throws `budget` when not even one expert of the largest size fits.
func planSlots(budgetBytes: Int, classes: [SizeClass], atOnce: Int) throws(LesonnxError) -> [Int] {
    let pages = budgetBytes / pageBytes
    let sizes = classes.map { $0.slotBytes / pageBytes }
    let largestRouted = classes.lastIndex { $0.routed > 0 } ?? classes.count - 1
    func pagesOf(_ counts: [Int]) -> Int { zip(counts, sizes).reduce(0) { $0 + $1.0 * $1.1 } }

    var slots = classes.map(\.pinned)
    slots[largestRouted] += min(atOnce, classes[largestRouted].routed)
    if pagesOf(slots) > pages {
        slots = classes.map { min(1, $0.pinned) }
        slots[largestRouted] += min(atOnce, classes[largestRouted].routed)
    }
    let rest = pages - pagesOf(slots)
    if rest < 0 {
        let count = min(pages / sizes[sizes.count - 1], classes.reduce(0) { $0 + $1.routed + $1.pinned })
        if count < 1 {
            throw .budget(
                "expert budget of \(budgetBytes) bytes: one expert takes \(classes[classes.count - 1].slotBytes) bytes")
        }
        return Array(repeating: 0, count: classes.count - 1) + [count]
    }
    var missing = zip(classes, slots).map { $0.routed + $0.pinned - $1 }
    let total = pagesOf(missing)
    var left = rest
    for i in sizes.indices {
        let share = total > 0 ? min(missing[i], rest * missing[i] / total) : 0
        slots[i] += share
        missing[i] -= share
        left -= share * sizes[i]
    }
    for i in sizes.indices.reversed() {
        let more = min(missing[i], left / sizes[i])
        slots[i] += more
        left -= more * sizes[i]
    }
    return slots
}

/// Slots by class, in slabs that each hold one class. Owned by the scheduler.
///
/// A slot is a number: those of class 0 first, then those of class 1, and so on. The budget given here is the largest there
/// will ever be, so slabs keep their numbers and never grow beyond their first length; a smaller budget takes slots away from
/// the end of every class, where a host can give memory back.
///
/// Fragmentation is bounded: slots of a class never break up. What is lost is less than one slot a class at the end of the
/// budget, and the difference between a slot and a smaller expert that lies in it.
struct SlotAllocator: Sendable {
    private let classes: [SizeClass]
    private let atOnce: Int
    private let largestBudgetBytes: Int
    private let perSlab: [Int]
    private let counts: [Int]
    private var base: [Int] = []  // first slot of each class
    private var limit: [Int]  // slots of each class in force
    private var taken: [Bool]
    private var free: [[Int]] = []  // by class; the last is taken first
    /// The class of each slot.
    private(set) var classOf: [Int] = []
    /// Where each slot lies.
    private(set) var place: [Place] = []

    init(classes: [SizeClass], atOnce: Int, budgetBytes: Int, slabBytes: Int) throws(LesonnxError) {
        guard let largest = classes.last, classes.allSatisfy({ $0.slotBytes > 0 && $0.slotBytes % pageBytes == 0 }) else {
            throw .schedule("every class of experts needs a size that is a whole number of pages")
        }
        if zip(classes, classes.dropFirst()).contains(where: { $0.slotBytes >= $1.slotBytes }) {
            throw .schedule("classes of experts must ascend by size")
        }
        let slabLimit = min(slabBytes, slabLimitBytes)
        if largest.slotBytes > slabLimit {
            throw .budget("an expert of \(largest.slotBytes) bytes does not fit a slab of \(slabBytes) bytes")
        }
        self.classes = classes
        self.atOnce = atOnce
        largestBudgetBytes = budgetBytes
        counts = try planSlots(budgetBytes: budgetBytes, classes: classes, atOnce: atOnce)
        limit = counts
        perSlab = classes.map { slabLimit / $0.slotBytes }
        var slab = 0
        for (i, count) in counts.enumerated() {
            let per = perSlab[i]
            let first = place.count
            base.append(first)
            for n in 0..<count {
                place.append(Place(slab: slab + n / per, offsetBytes: n % per * classes[i].slotBytes))
                classOf.append(i)
            }
            free.append(Array((first..<first + count).reversed()))
            slab += (count + per - 1) / per
        }
        taken = Array(repeating: false, count: place.count)
    }

    /// Every slab there will ever be, by number, with its present length (0: give it back).
    func slabs() -> [Slab] {
        var slabs: [Slab] = []
        for (i, sizeClass) in classes.enumerated() {
            for start in stride(from: 0, to: counts[i], by: perSlab[i]) {
                let end = min(start + perSlab[i], counts[i])
                let last = (start..<end).last { $0 < limit[i] || taken[base[i] + $0] }
                let used = last.map { $0 - start + 1 } ?? 0
                slabs.append(Slab(lengthBytes: used * sizeClass.slotBytes, slotBytes: sizeClass.slotBytes))
            }
        }
        return slabs
    }

    /// Slots in force, and slots taken away whose expert is still needed.
    func committedBytes() -> Int {
        var total = 0
        for (i, sizeClass) in classes.enumerated() {
            let late = taken[(base[i] + limit[i])..<(base[i] + counts[i])].count { $0 }
            total += (limit[i] + late) * sizeClass.slotBytes
        }
        return total
    }

    /// Whether a smaller budget has taken this slot away.
    func isRetired(_ slot: Int) -> Bool {
        let i = classOf[slot]
        return slot - base[i] >= limit[i]
    }

    /// Whether `take` would find a slot.
    func hasFree(_ sizeClass: Int) -> Bool {
        for i in sizeClass..<free.count where !free[i].isEmpty {
            return true
        }
        return false
    }

    /// A free slot of the smallest class that holds `sizeClass`, the latest given back; nil if there is none.
    mutating func take(_ sizeClass: Int) -> Int? {
        for i in sizeClass..<free.count {
            if let slot = free[i].popLast() {
                taken[slot] = true
                return slot
            }
        }
        return nil
    }

    /// Give a slot back; one that was taken away by a smaller budget is gone.
    mutating func release(_ slot: Int) {
        taken[slot] = false
        if !isRetired(slot) {
            free[classOf[slot]].append(slot)
        }
    }

    /// Plan again for another budget; gives the taken slots beyond the new ends, ascending.
    ///
    /// Throws as `planSlots` does, changing nothing.
    mutating func resize(budgetBytes: Int) throws(LesonnxError) -> [Int] {
        let planned = try planSlots(
            budgetBytes: min(budgetBytes, largestBudgetBytes), classes: classes, atOnce: atOnce)
        limit = zip(planned, counts).map { min($0, $1) }
        var beyond: [Int] = []
        for i in classes.indices {
            let end = base[i] + limit[i]
            // Kept in the order of use, then what growth brought, so that the same events give the same places.
            let kept = free[i].filter { $0 < end }
            let known = Set(kept)
            let grown = (base[i]..<end).reversed().filter { !taken[$0] && !known.contains($0) }
            free[i] = grown + kept
            beyond += (end..<base[i] + counts[i]).filter { taken[$0] }
        }
        return beyond
    }
}
