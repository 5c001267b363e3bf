import Foundation
import Testing

@testable import LesonnxScheduler

private let golden = try! readJSON(testData.appending(path: "sampling.json"))

@Test func pcg32Golden() throws {
    for record in try need(golden["pcg32"]?.array, "pcg32") {
        var random = Pcg32(seed: UInt64(try record.int("seed")), stream: UInt64(try record.int("stream")))
        let outputs = try record.ints("outputs")
        #expect(outputs.map { _ in Int(random.nextUInt32()) } == outputs)
    }
}

@Test func expGolden() throws {
    for pair in try need(golden["exp"]?.array, "exp") {
        let numbers = try need(pair.array, "pair").compactMap(\.number)
        var value = [numbers[0]]
        value.withUnsafeMutableBufferPointer { expNonPositive($0) }
        #expect(value == [numbers[1]], "e^\(numbers[0])")
    }
}

@Test func goldenCases() throws {
    let cases = try need(golden["cases"]?.array, "cases")
    #expect(cases.count >= 14)
    for record in cases {
        let name = record["name"]?.string ?? ""
        var sampler = Sampler(try options(need(record["options"], "options")))
        try sampler.accept(all: record.ints("accept"))
        var random = record["logits_seed"]?.int.map { Pcg32(seed: UInt64($0), stream: 1) }
        for (number, step) in try need(record["steps"]?.array, "steps").enumerated() {
            let logits: [Float]
            if let size = record["vocab_size"]?.int {
                logits = (0..<size).map { _ in Float(Double(random!.nextUInt32() >> 17) / 2048 - 8) }
            } else {
                logits = try need(step["logits"]?.array, "logits").map { Float($0.number ?? -.infinity) }
            }
            if let ids = step["ids"]?.array {
                let distribution = try sampler.distribution(logits)
                #expect(distribution.map(\.id) == ids.compactMap(\.int), "\(name), step \(number)")
                #expect(distribution.map(\.weight) == step["probabilities"]?.array?.compactMap(\.number), "\(name), step \(number)")
            }
            let token = try sampler.sample(logits)
            #expect(try token == step.int("token"), "\(name), step \(number)")
            try sampler.accept(token)
        }
    }
}

private func options(_ record: JSON) throws -> SamplingOptions {
    func number(_ key: String) throws -> Double { try need(record[key]?.number, key) }
    return try SamplingOptions(
        temperature: number("temperature"), topK: record.int("top_k"), topP: number("top_p"), minP: number("min_p"),
        repetitionPenalty: number("repetition_penalty"), seed: UInt64(record.int("seed")))
}

/// Steps 1 to 6 word by word, sorting everything: what is left, in order.
private func reference(_ logits: [Float], _ options: SamplingOptions, _ seen: Set<Int>) -> [Weighted] {
    let scores = logits.enumerated().map { token, logit -> Float in
        if options.repetitionPenalty == 1 || !seen.contains(token) {
            return logit + 0
        }
        let wide = Double(logit)
        return Float(wide > 0 ? wide / options.repetitionPenalty : wide * options.repetitionPenalty) + 0
    }
    let greatest = Double(scores.max()!)
    var weights = scores.map { (Double($0) - greatest) / options.temperature }
    weights.withUnsafeMutableBufferPointer { expNonPositive($0) }
    var order = scores.indices.sorted { (-scores[$0], $0) < (-scores[$1], $1) }
    var total = weights.reduce(0, +)
    if options.topK > 0 && options.topK < order.count {
        order = Array(order.prefix(options.topK))
        total = order.reduce(0) { $0 + weights[$1] }
    }
    if options.topP < 1 {
        var sum = 0.0
        var count = 0
        while count < order.count && (count == 0 || sum < options.topP * total) {
            sum += weights[order[count]]
            count += 1
        }
        order = Array(order.prefix(count))
    }
    return order.prefix { weights[$0] >= options.minP && weights[$0] != 0 }.map { Weighted(id: $0, weight: weights[$0]) }
}

@Test(arguments: 0..<150) func distributionAndSampleAreTheirDefinition(_ seed: Int) throws {
    var dice = Dice(1000 + seed)
    let count = dice.pick([1, 2, 10, 300, 700])
    var logits = (0..<count).map { _ in
        dice.chance(0.2) ? dice.pick([0, -0.0, 1, -Float.infinity]) : Float.random(in: -30...30, using: &dice)
    }
    logits[dice.int(0...count - 1)] = 2
    let options = try SamplingOptions(
        temperature: dice.pick([1e-300, 0.01, 0.7, 1, 2.5]), topK: dice.pick([0, 1, 3, 8, 1000]),
        topP: dice.pick([1, 0.999, 0.9, 0.5, 1e-9]), minP: dice.pick([0, 1e-6, 0.1, 1]),
        repetitionPenalty: dice.pick([1, 1.3, 0.8]), seed: dice.next())
    let seen = Set((0..<dice.int(0...20)).map { _ in dice.int(0...400) })
    var sampler = Sampler(options)
    try sampler.accept(all: seen)
    let expected = reference(logits, options, seen)
    let distribution = try sampler.distribution(logits)
    #expect(distribution.map(\.id) == expected.map(\.id))
    #expect(abs(distribution.reduce(0) { $0 + $1.weight } - 1) < 1e-12)
    // The draw itself, by running sums over what is left.
    let isOn = (options.topK > 0 && options.topK < count) || options.topP < 1 || options.minP > 0
    var random = Pcg32(seed: options.seed)
    let kept = expected.reduce(0) { $0 + $1.weight }
    let u = random.uniform()
    if isOn {
        var sum = 0.0
        let chosen = expected.first {
            sum += $0.weight
            return sum > u * kept
        }
        #expect(try sampler.sample(logits) == (chosen ?? expected.last!).id)
    } else {
        let token = try sampler.sample(logits)
        #expect(expected.contains { $0.id == token })
    }
}

@Test func theOrderIsThatOfASort() {
    var dice = Dice(5)
    for _ in 0..<200 {
        let scores = (0..<dice.int(1...60)).map { _ in Float(dice.int(-3...3)) }
        let sorted = scores.indices.sorted { (-scores[$0], $0) < (-scores[$1], $1) }
        let count = dice.int(1...scores.count)
        #expect(Sampler.order(scores, count) == Array(sorted.prefix(count)))
    }
}

@Test func theMeaningOfAcceptAndRetract() throws {
    var sampler = Sampler(try SamplingOptions(repetitionPenalty: 2))
    let logits: [Float] = [1, 1.5, 0]
    #expect(try sampler.sample(logits) == 1)
    try sampler.accept(all: [1, 1])
    #expect(try sampler.sample(logits) == 0)
    try sampler.retract(1)
    #expect(try sampler.sample(logits) == 0)
    try sampler.retract(1)
    #expect(try sampler.sample(logits) == 1)
    #expect(throws: LesonnxError.input("token 1 was never accepted, so it cannot be taken back")) { try sampler.retract(1) }
    #expect(throws: LesonnxError.input("token id is -1, expected at least 0")) { try sampler.accept(-1) }
}

@Test func logitsThatAreNone() {
    var sampler = Sampler()
    #expect(throws: LesonnxError.self) { try sampler.sample([]) }
    for (logits, what) in [([Float.nan, 1], "NaN"), ([1, .infinity], "+inf"), ([-.infinity, -.infinity], "nothing but -inf")] {
        #expect(throws: LesonnxError.failure("logits hold \(what): the model's output is broken, so no token can be chosen")) {
            try sampler.sample(logits)
        }
    }
}

@Test func optionsOutsideTheirRange() {
    #expect(throws: LesonnxError.input("temperature is -1.0, expected a finite number of at least 0")) {
        try SamplingOptions(temperature: -1)
    }
    #expect(throws: LesonnxError.self) { try SamplingOptions(temperature: .nan) }
    #expect(throws: LesonnxError.input("top_k is -1, expected at least 0 (0 is off)")) { try SamplingOptions(topK: -1) }
    #expect(throws: LesonnxError.self) { try SamplingOptions(topP: 0) }
    #expect(throws: LesonnxError.self) { try SamplingOptions(topP: .nan) }
    #expect(throws: LesonnxError.self) { try SamplingOptions(minP: 1.5) }
    #expect(throws: LesonnxError.self) { try SamplingOptions(repetitionPenalty: 0) }
}
