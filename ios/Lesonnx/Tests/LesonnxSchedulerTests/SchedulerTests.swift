import Testing

@testable import LesonnxScheduler

private func leastBytes(_ layers: [LayerShape]) -> Int {
    layers.map { $0.numExpertsPerTok * $0.costBytes + $0.sharedCostBytes }.max()!
}

private func totalBytes(_ layers: [LayerShape]) -> Int {
    layers.reduce(0) { $0 + $1.numExperts * $1.costBytes + $1.sharedCostBytes }
}

private func someModel(_ dice: inout Dice) -> [LayerShape] {
    let sizes = (0..<dice.int(1...3)).map { _ in dice.int(1...6) * pageBytes }
    let shared = dice.pick([0, 0, 1, 3]) * pageBytes
    let perTok = dice.int(1...4)
    return (0..<dice.int(1...5)).map { _ in
        LayerShape(
            numExperts: dice.int(perTok...10), numExpertsPerTok: dice.chance(0.5) ? perTok : dice.int(1...perTok),
            costBytes: dice.pick(sizes), sharedCostBytes: shared)
    }
}

private func someConfig(_ dice: inout Dice) -> SchedulerConfig {
    var config = SchedulerConfig()
    config.policy = dice.pick(Policy.allCases)
    config.maxLoads = dice.int(1...5)
    config.computeFirst = dice.chance(0.5)
    config.lookahead = dice.chance(0.5)
    config.lookaheadLoads = dice.int(1...4)
    config.lookaheadBytes = dice.pick([0, 4 * pageBytes, 40 * pageBytes])
    config.lookaheadOdds = dice.pick([0, one / 3, one])
    config.slabBytes = dice.pick([6 * pageBytes, 25 * pageBytes, slabLimitBytes])
    return config
}

private func someRows(_ count: Int, _ shape: LayerShape, _ dice: inout Dice) -> [[Int]] {
    (0..<count).map { _ in Array((0..<shape.numExperts).shuffled(using: &dice).prefix(shape.numExpertsPerTok)) }
}

@Test(arguments: 0..<300) func invariantsHoldForAnyRun(_ seed: Int) throws {
    var dice = Dice(seed)
    let layers = someModel(&dice)
    var config = someConfig(&dice)
    let (least, total) = (leastBytes(layers), totalBytes(layers))
    let budget = dice.int(least...total + 8 * pageBytes)
    if dice.chance(0.4) {
        config.retain = false
        config.lookahead = false
    } else if budget >= total && dice.chance(0.5) {
        config.resident = true
    }
    let made = Result { () throws -> Scheduler in try Scheduler(layers: layers, budgetBytes: budget, config: config) }
    if config.resident, case .failure(LesonnxError.budget) = made {
        return  // slots of several sizes may need a little more than the experts
    }
    let scheduler = try made.get()
    var host = AuditingHost(scheduler, budgetBytes: budget, dice: dice)
    host.readsFail = true
    /// What may come at any moment: a prediction for another layer, or nothing.
    func noise(_ host: inout AuditingHost) throws {
        let layer = host.dice.int(0...layers.count - 1)
        if host.dice.chance(0.4) && layer != host.scheduler.openLayer {
            let count = host.dice.int(1...3) * layers[layer].numExperts
            let scores = (0..<count).map { _ in Float.random(in: -3...3, using: &host.dice) }
            try host.apply(host.scheduler.predict(layer: layer, scores: fixedScores(scores)))
        }
    }
    for _ in 0..<dice.int(1...5) {
        let rows = dice.pick([1, 1, 2, 3, 12])
        let drafts = dice.int(0...rows - 1)
        try host.apply(host.scheduler.beginStep(rows: rows, drafts: drafts))
        for (layer, shape) in layers.enumerated() {
            let present = dice.chance(0.9) ? rows : dice.int(1...rows)
            try noise(&host)
            try host.runLayer(layer, someRows(present, shape, &dice), before: noise)
            #expect(config.retain || host.residentCount == 0)
        }
        if drafts > 0 {
            let kept = rows - drafts + dice.int(0...drafts)
            try host.apply(host.scheduler.accept(rows: Array(0..<kept)))
        }
        if !config.resident && dice.chance(0.5) {
            // What is loading cannot be taken back; all else must fit at once, and everything when the reads are done.
            let new = dice.int(least...budget)
            let loading = host.loading.reduce(0) { $0 + host.cost[$1] }
            host.budgetBytes = max(host.budgetBytes, new)
            try host.apply(host.scheduler.pressure(budgetBytes: new))
            host.budgetBytes = new + loading
            try host.checkMemory()
            while try host.happen() {}
            host.budgetBytes = new
            try host.checkMemory()
            #expect(host.scheduler.committedBytes() <= new)
            #expect(host.scheduler.slabs().reduce(0) { $0 + $1.lengthBytes } <= new)
        }
    }
    while try host.happen() {}
    let counters = host.scheduler.counters
    #expect(counters.lookaheadUsed + counters.lookaheadWasted <= counters.lookaheadLoads)
}

@Test func aCopyGoesItsOwnWay() throws {
    let layers = [LayerShape(numExperts: 4, numExpertsPerTok: 2, costBytes: pageBytes)]
    var one = try Scheduler(layers: layers, budgetBytes: 3 * pageBytes)
    _ = try one.beginStep(rows: 1)
    let before = one
    let actions = try one.route(layer: 0, expertIds: [[1, 2]])
    #expect(before.openLayer == nil && before.state(of: 1) == .absent)
    var other = before
    #expect(try other.route(layer: 0, expertIds: [[1, 2]]) == actions)
}

@Test func eventsThatCannotHappenChangeNothing() throws {
    let layers = Array(repeating: LayerShape(numExperts: 4, numExpertsPerTok: 2, costBytes: pageBytes), count: 2)
    var scheduler = try Scheduler(layers: layers, budgetBytes: 4 * pageBytes)
    func refuses(_ event: (inout Scheduler) throws -> [Action]) {
        do {
            _ = try event(&scheduler)
            Issue.record("an event that cannot happen was taken")
        } catch LesonnxError.schedule(let text) {
            #expect(!text.contains("\n"))
        } catch {
            Issue.record("another error: \(error)")
        }
    }
    refuses { try $0.route(layer: 0, expertIds: [[0, 1]]) }  // no step
    _ = try scheduler.beginStep(rows: 2)
    refuses { try $0.route(layer: 2, expertIds: [[0, 1]]) }
    refuses { try $0.route(layer: 0, expertIds: []) }
    refuses { try $0.route(layer: 0, expertIds: [[0], [1], [2]]) }
    refuses { try $0.route(layer: 0, expertIds: [[0, 0]]) }
    refuses { try $0.route(layer: 0, expertIds: [[0, 4]]) }
    refuses { try $0.route(layer: 0, expertIds: [[0, -1]]) }
    refuses { try $0.route(layer: 0, expertIds: [[0, 1, 2]]) }
    refuses { try $0.endLayer() }
    refuses { try $0.loaded(0, readUs: 1) }
    refuses { try $0.loaded(99, readUs: 1) }
    refuses { try $0.loadFailed(3) }
    refuses { try $0.computed([0]) }
    refuses { try $0.predict(layer: 0, scores: [1, 2, 3]) }
    refuses { try $0.predict(layer: -1, scores: [1, 2, 3, 4]) }
    refuses { try $0.beginStep(rows: 1, drafts: 1) }
    refuses { try $0.accept(rows: [2]) }
    #expect(scheduler.openLayer == nil && scheduler.counters == Counters())
    #expect(try scheduler.route(layer: 0, expertIds: [[0, 1]]).count == 2)
    refuses { try $0.beginStep(rows: 1) }
    refuses { try $0.predict(layer: 0, scores: [1, 2, 3, 4]) }
    refuses { try $0.endLayer() }
    #expect(throws: LesonnxError.budget("expert budget of 4096 bytes: at least 8192 are needed")) {
        try scheduler.pressure(budgetBytes: pageBytes)
    }
}

@Test func budgetsAndSwitchesThatCannotBe() {
    let layers = [LayerShape(numExperts: 4, numExpertsPerTok: 2, costBytes: pageBytes)]
    #expect(throws: LesonnxError.budget("expert budget of 8191 bytes: at least 8192 are needed")) {
        try Scheduler(layers: layers, budgetBytes: 2 * pageBytes - 1)
    }
    var config = SchedulerConfig()
    config.resident = true
    #expect(throws: LesonnxError.budget("expert budget of 12288 bytes: all experts in memory need 16384")) {
        try Scheduler(layers: layers, budgetBytes: 3 * pageBytes, config: config)
    }
    config.retain = false
    #expect(throws: LesonnxError.self) { try Scheduler(layers: layers, budgetBytes: 4 * pageBytes, config: config) }
    #expect(throws: LesonnxError.self) { try Scheduler(layers: [], budgetBytes: 4 * pageBytes) }
}

@Test func residentLoadsEverythingOnce() throws {
    let layers = Array(repeating: LayerShape(numExperts: 5, numExpertsPerTok: 2, costBytes: pageBytes), count: 3)
    var config = SchedulerConfig()
    config.resident = true
    let scheduler = try Scheduler(layers: layers, budgetBytes: totalBytes(layers), config: config)
    var host = AuditingHost(scheduler, budgetBytes: totalBytes(layers), dice: Dice(1))
    for _ in 0..<4 {
        try host.apply(host.scheduler.beginStep(rows: 1))
        for layer in layers.indices {
            let rows = someRows(1, layers[layer], &host.dice)
            try host.runLayer(layer, rows)
        }
    }
    while try host.happen() {}
    #expect(host.loads == 15 && host.residentCount == 15)
}

@Test func onDemandReadsOneAtATimeAndKeepsNothing() throws {
    let layers = Array(repeating: LayerShape(numExperts: 5, numExpertsPerTok: 3, costBytes: pageBytes), count: 2)
    let budget = totalBytes(layers)
    var host = AuditingHost(
        try Scheduler(layers: layers, budgetBytes: budget, config: .onDemand), budgetBytes: budget, dice: Dice(2))
    for _ in 0..<3 {
        try host.apply(host.scheduler.beginStep(rows: 1))
        for layer in layers.indices {
            try host.runLayer(layer, [[4, 0, 2]])
            #expect(host.residentCount == 0)
        }
    }
    #expect(host.loads == 3 * 2 * 3 && host.scheduler.counters.hits == 0)
}

/// The governor keeps lookahead where it is faster, drops it where it is not, and looks again.
@Suite struct GovernorTests {
    private let round = 2 * Governor.trialSteps + Governor.holdSteps

    private func steps(_ governor: inout Governor, _ count: Int, with: Double, without: Double) -> [Bool] {
        (0..<count).map { _ in
            let wants = governor.wants()
            governor.took(seconds: wants ? with : without)
            return wants
        }
    }

    @Test(arguments: [(1.0, 1.2, true), (1.2, 1.0, false)]) func holdsWhatIsFaster(_ with: Double, _ without: Double, _ expected: Bool) {
        var governor = Governor()
        let looked = steps(&governor, round, with: with, without: without)
        #expect(looked.prefix(2 * Governor.trialSteps).enumerated().allSatisfy { $1 == ($0 % 2 == 0) })
        #expect(looked.dropFirst(2 * Governor.trialSteps).allSatisfy { $0 == expected })
    }

    @Test func nearTiesChangeNothing() {
        var governor = Governor()
        let looked = steps(&governor, round, with: 1 + Governor.margin / 2, without: 1)
        #expect(looked.dropFirst(2 * Governor.trialSteps).allSatisfy { $0 })
    }

    @Test func looksAgain() {
        var governor = Governor()
        #expect(steps(&governor, round, with: 1.3, without: 1).last == false)
        #expect(steps(&governor, round, with: 1, without: 1.3).last == true)
    }

    @Test func anOutlierDoesNotDecide() {
        var governor = Governor()
        for step in 0..<2 * Governor.trialSteps {
            governor.took(seconds: step == 0 ? 50 : governor.wants() ? 1 : 1.1)
        }
        #expect(governor.wants())
    }
}
