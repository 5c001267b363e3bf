import Foundation
import Testing

@testable import LesonnxScheduler

private let traces = try! FileManager.default.contentsOfDirectory(atPath: testData.appending(path: "traces").path)
    .filter { $0.hasSuffix(".json") }.sorted()

@Test func thereAreTraces() {
    #expect(traces.count >= 15)
}

@Test(arguments: traces) func aTraceReplaysExactly(_ name: String) throws {
    let trace = try readJSON(testData.appending(path: "traces/\(name)"))
    try #require(trace.int("format") == 1)
    var scheduler = try makeScheduler(trace)
    for (number, event) in try need(trace["events"]?.array, "events").enumerated() {
        let answer = try answer(&scheduler, event)
        let expected = event["error"].map { .string($0.string ?? "") } ?? event["actions"]
        try #require(answer == expected, "\(name), event \(number)")
    }
    #expect(endState(scheduler) == trace["end"])
}

func makeScheduler(_ trace: JSON) throws -> Scheduler {
    let layers = try need(trace["layers"]?.array, "layers").map { layer in
        LayerShape(
            numExperts: try layer.int("num_experts"), numExpertsPerTok: try layer.int("num_experts_per_tok"),
            costBytes: try layer.int("cost_bytes"), sharedCostBytes: try layer.int("shared_cost_bytes"))
    }
    let written = try need(trace["config"], "config")
    func flag(_ key: String) throws -> Bool { try need(written[key]?.bool, key) }
    var config = SchedulerConfig()
    config.policy = try need(Policy(rawValue: written["policy"]?.string ?? ""), "policy")
    config.maxLoads = try written.int("max_loads")
    config.computeFirst = try flag("compute_first")
    config.lookahead = try flag("lookahead")
    config.lookaheadLoads = try written.int("lookahead_loads")
    config.lookaheadBytes = try written.int("lookahead_bytes")
    config.lookaheadOdds = try written.int("lookahead_odds")
    config.retain = try flag("retain")
    config.resident = try flag("resident")
    config.slabBytes = try written.int("slab_bytes")
    #expect(written.object?.count == 10, "a switch that this test does not know")
    return try Scheduler(layers: layers, budgetBytes: trace.int("budget_bytes"), config: config)
}

/// What the scheduler answers, as the traces write it: its actions, or the name of its error.
func answer(_ scheduler: inout Scheduler, _ event: JSON) throws -> JSON {
    do {
        return .array(try actions(&scheduler, event).map(written))
    } catch LesonnxError.load {
        return .string("load")
    }
}

private func actions(_ scheduler: inout Scheduler, _ event: JSON) throws -> [Action] {
    switch event["event"]?.string {
    case "begin_step": return try scheduler.beginStep(rows: event.int("rows"), drafts: event.int("drafts"))
    case "route": return try scheduler.route(layer: event.int("layer"), expertIds: rows(event, "expert_ids"))
    case "predict":
        let scores = try rows(event, "scores").joined().map { Int32($0) }
        return try scheduler.predict(layer: event.int("layer"), scores: scores)
    case "loaded": return try scheduler.loaded(event.int("expert"), readUs: event.int("read_us"))
    case "load_failed": return try scheduler.loadFailed(event.int("expert"))
    case "computed": return try scheduler.computed(event.ints("experts"))
    case "end_layer": return try scheduler.endLayer()
    case "accept": return try scheduler.accept(rows: event.ints("rows"))
    case "pressure": return try scheduler.pressure(budgetBytes: event.int("budget_bytes"))
    default: throw Missing(description: "event \(event)")
    }
}

private func rows(_ event: JSON, _ key: String) throws -> [[Int]] {
    try need(event[key]?.array, key).map { try need($0.array, key).compactMap(\.int) }
}

private func written(_ action: Action) -> JSON {
    func words(_ name: String, _ numbers: [Int]) -> JSON { .array([.string(name)] + numbers.map { .int($0) }) }
    switch action {
    case .load(let expert, let lookahead, let slab, let offset):
        let kind = JSON.string(lookahead ? "lookahead" : "demand")
        return .array([.string("load"), .int(expert), kind, .int(slab), .int(offset)])
    case .evict(let expert): return words("evict", [expert])
    case .compute(let experts): return words("compute", experts)
    case .promote(let expert): return words("promote", [expert])
    case .cancel(let expert): return words("cancel", [expert])
    }
}

private func endState(_ scheduler: Scheduler) -> JSON {
    func object(_ entries: [(String, JSON)]) -> JSON { .object(entries.map { JSON.Entry(key: $0, value: $1) }) }
    let counters = scheduler.counters
    let places = (0..<scheduler.numExperts).compactMap { expert in
        scheduler.place(of: expert).map { JSON.array([.int(expert), .int($0.slab), .int($0.offsetBytes)]) }
    }
    return object([
        (
            "counters",
            object([
                ("hits", .int(counters.hits)), ("late", .int(counters.late)), ("misses", .int(counters.misses)),
                ("demand_bytes", .int(counters.demandBytes)), ("lookahead_bytes", .int(counters.lookaheadBytes)),
                ("lookahead_loads", .int(counters.lookaheadLoads)), ("lookahead_used", .int(counters.lookaheadUsed)),
                ("lookahead_wasted", .int(counters.lookaheadWasted)), ("evictions", .int(counters.evictions)),
            ])
        ),
        ("committed_bytes", .int(scheduler.committedBytes())),
        ("lookahead_level", .int(scheduler.lookaheadLevel)),
        ("slabs", .array(scheduler.slabs().map { .array([.int($0.lengthBytes), .int($0.slotBytes)]) })),
        ("places", .array(places)),
    ])
}

@Test func fixedScoresOfTheVectors() throws {
    let vectors = try readJSON(testData.appending(path: "fixed_scores.json"))
    let scores = try vectors.ints("float32_bits").map { Float(bitPattern: UInt32($0)) }
    let fixed = try vectors.ints("fixed")
    #expect(fixedScores(scores).map { Int($0) } == fixed)
}
