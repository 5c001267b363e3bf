@testable import LesonnxScheduler

struct Violation: Error, CustomStringConvertible {
    let description: String
}

func check(_ condition: Bool, _ message: @autoclosure () -> String) throws {
    if !condition {
        throw Violation(description: message())
    }
}

/// A host without threads for the scheduler: carries actions out in any order, keeps its own account of memory, and checks what
/// must always hold.
struct AuditingHost {
    private struct Held {
        var place: Place
        var isResident = false
        var isSpeculative: Bool
    }

    var scheduler: Scheduler
    var budgetBytes: Int
    var dice: Dice
    /// Whether reads may fail; never twice in a row.
    var readsFail = false
    let cost: [Int]
    private(set) var loading: [Int] = []
    private var held: [Int: Held] = [:]
    private var required: Set<Int> = []
    private var batches: [[Int]] = []
    private var computed: [Int] = []
    private var failing: Set<Int> = []
    private(set) var loads = 0

    init(_ scheduler: Scheduler, budgetBytes: Int, dice: Dice) {
        self.scheduler = scheduler
        self.budgetBytes = budgetBytes
        self.dice = dice
        cost = scheduler.layers.flatMap { shape in
            Array(repeating: shape.costBytes, count: shape.numExperts)
                + (shape.sharedCostBytes > 0 ? [shape.sharedCostBytes] : [])
        }
    }

    var residentCount: Int { held.values.count(where: \.isResident) }

    mutating func apply(_ actions: [Action]) throws {
        for action in actions {
            switch action {
            case .load(let expert, let lookahead, let slab, let offset):
                try load(expert, lookahead, Place(slab: slab, offsetBytes: offset))
            case .evict(let expert):
                try check(held[expert]?.isResident == true, "evicted \(expert), which is not resident")
                try check(!required.contains(expert), "evicted \(expert), which is required")
                held[expert] = nil
            case .compute(let experts):
                try check(!experts.isEmpty, "an empty batch")
                try check(batches.isEmpty, "two batches at once")
                for expert in experts {
                    try check(held[expert]?.isResident == true, "compute of \(expert), which is not resident")
                    try check(required.contains(expert), "compute of \(expert), which is not required")
                }
                batches.append(experts)
            case .promote(let expert):
                held[expert]?.isSpeculative = false
            case .cancel(let expert):
                try check(!required.contains(expert), "cancelled \(expert), which is required")
            }
        }
        try checkMemory()
    }

    private mutating func load(_ expert: Int, _ lookahead: Bool, _ place: Place) throws {
        try check(!loading.contains(expert), "\(expert) is read twice at once")
        let old = held[expert]
        try check(old?.isResident != true, "\(expert) is read though resident")
        try check(old == nil || old!.place == place, "the second try of \(expert) is elsewhere")
        let isCalledFor = lookahead || required.contains(expert) || scheduler.config.resident
        try check(isCalledFor, "\(expert) is not required")
        held[expert] = Held(place: place, isSpeculative: lookahead)
        loading.append(expert)
        loads += 1
        try check(loading.count <= scheduler.config.maxLoads, "too many loads at once")
        let ahead = loading.count { held[$0]!.isSpeculative }
        try check(ahead <= scheduler.config.lookaheadLoads, "too many lookahead loads at once")
    }

    func checkMemory() throws {
        let bytes = held.keys.reduce(0) { $0 + cost[$1] }
        try check(bytes <= budgetBytes, "\(bytes) bytes held, budget \(budgetBytes)")
        let slabs = scheduler.slabs()
        var ends: [Int: Int] = [:]
        let order = held.sorted { ($0.value.place.slab, $0.value.place.offsetBytes) < ($1.value.place.slab, $1.value.place.offsetBytes) }
        for (expert, entry) in order {
            let (slab, start) = (entry.place.slab, entry.place.offsetBytes)
            try check(start >= ends[slab, default: 0], "two experts overlap")
            try check(start % pageBytes == 0, "a place off the page grid")
            let end = start + cost[expert]
            try check(end <= slabs[slab].lengthBytes, "a place beyond its slab")
            ends[slab] = end
        }
        try check(slabs.allSatisfy { $0.lengthBytes <= scheduler.config.slabBytes }, "a slab that is too long")
    }

    /// Let one pending thing happen: a read ends or a batch is computed. False if nothing is pending.
    mutating func happen() throws -> Bool {
        let pending = loading.count + batches.count
        if pending == 0 {
            return false
        }
        let pick = dice.int(0...pending - 1)
        if pick < loading.count {
            try endRead(pick)
        } else {
            let batch = batches.removeFirst()
            required.subtract(batch)
            computed += batch
            try apply(scheduler.computed(batch))
        }
        return true
    }

    private mutating func endRead(_ at: Int) throws {
        let expert = loading.remove(at: at)
        if readsFail && !failing.contains(expert) && dice.chance(0.1) {
            failing.insert(expert)
            if held[expert]!.isSpeculative {
                held[expert] = nil
            }
            try apply(scheduler.loadFailed(expert))
            return
        }
        failing.remove(expert)
        held[expert]!.isResident = true
        held[expert]!.isSpeculative = false
        let us = dice.int(1...9000)
        try apply(scheduler.loaded(expert, readUs: us))
    }

    /// A layer from `route` to `endLayer`; `before` comes before each thing that happens.
    mutating func runLayer(_ layer: Int, _ rows: [[Int]], before: (inout AuditingHost) throws -> Void = { _ in }) throws {
        let shape = scheduler.layers[layer]
        let first = scheduler.first[layer]
        required = Set(rows.joined().map { first + $0 })
        if shape.sharedCostBytes > 0 {
            required.insert(first + shape.numExperts)
        }
        let expected = required.sorted()
        computed = []
        try apply(scheduler.route(layer: layer, expertIds: rows))
        while !required.isEmpty {
            try before(&self)
            let happened = try happen()
            try check(happened, "nothing is pending, but \(required.sorted()) are required")
        }
        try check(computed.sorted() == expected, "not every required expert was computed exactly once")
        try apply(scheduler.endLayer())
    }
}
