import LesonnxScheduler

/// What the scheduler itself costs: microseconds a layer of decoding, with a cache that holds a share of the experts.
///
/// Routing is made up, seeded: each layer's choice keeps most of the last one's experts. Reads end before the next event, so
/// nothing but the scheduler's own work is timed.
enum SchedulerBenchmark {
    struct Result {
        var steps: Int
        var usPerLayer: Double
        var hitShare: Double
    }

    static func report() throws {
        for share in [0.1, 0.25, 0.5] {
            let result = try run(share: share)
            let us = (result.usPerLayer * 10).rounded() / 10
            print("48 layers of 128 experts, 8 a token, \(Int(share * 100)) % in memory: \(us) us a layer, \(Int(result.hitShare * 100)) % hits")
        }
    }

    static func run(layers: Int = 48, experts: Int = 128, perTok: Int = 8, share: Double = 0.25, steps: Int = 400) throws
        -> Result
    {
        let cost = 2_654_208
        let shape = LayerShape(numExperts: experts, numExpertsPerTok: perTok, costBytes: cost)
        let budget = max(perTok, Int(Double(layers * experts) * share)) * cost
        var scheduler = try Scheduler(layers: Array(repeating: shape, count: layers), budgetBytes: budget)
        var random = Pcg32(seed: 1)
        func below(_ n: Int) -> Int { Int(random.nextUInt32()) % n }
        var chosen = (0..<layers).map { _ in Array((0..<experts).prefix(perTok)) }
        var time = Duration.zero
        let clock = ContinuousClock()
        var measured = 0
        for step in 0..<(2 * steps) {
            let isWarm = step >= steps
            if isWarm {
                measured += 1
            }
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
                if isWarm {
                    time += clock.now - began
                }
            }
        }
        let us = Double(time.components.seconds) * 1e6 + Double(time.components.attoseconds) / 1e12
        let counters = scheduler.counters
        let required = counters.hits + counters.late + counters.misses
        return Result(
            steps: measured, usPerLayer: us / Double(measured * layers), hitShare: Double(counters.hits) / Double(required))
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
