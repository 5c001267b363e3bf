import LesonnxScheduler

/// What the scheduler itself costs: microseconds a layer of decoding, with a cache that holds a share of the experts.
///
/// Routing is made up, seeded: each layer's choice keeps most of the last one's experts. Reads end before the next event, so
/// nothing but the scheduler's own work is timed.
enum SchedulerBenchmark {
    struct Result {
        /// Median, of a layer from `route` to `endLayer` with its loads, batches and one prediction.
        var usPerLayer: Double
        var hitShare: Double
    }

    static func report() throws {
        // Four times the experts: their table has sixteen times the bytes, so that a copy of it would show.
        for (experts, share) in [(128, 0.1), (128, 0.25), (128, 0.5), (512, 0.25)] {
            let result = try run(experts: experts, share: share)
            let us = (result.usPerLayer * 10).rounded() / 10
            let hits = Int((result.hitShare * 100).rounded())
            print("48 layers of \(experts) experts, 8 a token, \(Int(share * 100)) % in memory: \(us) us a layer, \(hits) % hits")
        }
    }

    static func run(layers: Int = 48, experts: Int = 128, perTok: Int = 8, share: Double = 0.25, steps: Int = 200) throws
        -> Result
    {
        let cost = 2_654_208
        let shape = LayerShape(numExperts: experts, numExpertsPerTok: perTok, costBytes: cost)
        let budget = max(perTok, Int(Double(layers * experts) * share)) * cost
        var scheduler = try Scheduler(layers: Array(repeating: shape, count: layers), budgetBytes: budget)
        var random = Pcg32(seed: 1)
        func below(_ n: Int) -> Int { Int(random.nextUInt32()) % n }
        var chosen = (0..<layers).map { _ in Array((0..<experts).prefix(perTok)) }
        let clock = ContinuousClock()
        var times: [Duration] = []
        for step in 0..<(2 * steps) {
            for layer in 0..<layers {
                for place in 0..<perTok where below(3) == 0 {
                    let expert = below(experts)
                    if !chosen[layer].contains(expert) {
                        chosen[layer][place] = expert
                    }
                }
                let next = (layer + 1) % layers
                var scores = (0..<experts).map { _ in Int32(below(1 << 20)) }
                for expert in chosen[next] {
                    scores[expert] += 1 << 20
                }
                let rows = [chosen[layer]]
                let began = clock.now
                if layer == 0 {
                    try carryOut(scheduler.beginStep(rows: 1), &scheduler)
                }
                try carryOut(scheduler.route(layer: layer, expertIds: rows), &scheduler)
                try carryOut(scheduler.predict(layer: next, scores: scores), &scheduler)
                _ = try scheduler.endLayer()
                if step >= steps {
                    times.append(clock.now - began)
                }
            }
        }
        let us = Double(times.sorted()[times.count / 2].components.attoseconds) / 1e12
        let counters = scheduler.counters
        let required = counters.hits + counters.late + counters.misses
        return Result(usPerLayer: us, hitShare: Double(counters.hits) / Double(required))
    }

    private static func carryOut(_ first: [Action], _ scheduler: inout Scheduler) throws {
        var pending = first
        while let action = pending.popLast() {
            switch action {
            case .load(let expert, _, _, _): pending += try scheduler.loaded(expert, readUs: 1500)
            case .compute(let experts): pending += try scheduler.computed(experts)
            case .evict, .promote, .cancel: break
            }
        }
    }
}
