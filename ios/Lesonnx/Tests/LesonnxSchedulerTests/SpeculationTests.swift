import Foundation
import Testing

@testable import LesonnxScheduler

/// Drafters, draws, verification and prices of `tests/data/speculation.json`, which `tools/make_speculation_vectors.py` wrote from
/// Python.
@Suite struct SpeculationTests {
    private static let file = testData.appending(path: "speculation.json")
    private static let golden = try! readJSON(file)
    /// Seeds beyond `Int`, which `JSON` cannot hold.
    private static let seeds: [UInt64] = {
        struct Vectors: Decodable {
            struct Case: Decodable {
                struct Options: Decodable { var seed: UInt64? }
                let options: Options
            }
            let draft_sampler: [Case]
        }
        return try! JSONDecoder().decode(Vectors.self, from: Data(contentsOf: file)).draft_sampler.map { $0.options.seed ?? 0 }
    }()

    private func cases(_ key: String, atLeast count: Int) throws -> [JSON] {
        let cases = try need(Self.golden[key]?.array, key)
        #expect(cases.count >= count)
        return cases
    }

    /// Logits of one row: multiples of 1/2048 in [-8, 8).
    private func logits(_ random: inout Pcg32) throws -> [Float] {
        try (0..<Self.golden.int("vocab_size")).map { _ in Float(Double(random.nextUInt32() >> 17) / 2048 - 8) }
    }

    private func options(_ record: JSON?, seed: UInt64? = nil) throws -> SamplingOptions {
        func number(_ key: String) -> Double? { record?[key]?.number }
        return try SamplingOptions(
            temperature: number("temperature") ?? 0, topK: record?["top_k"]?.int ?? 0, topP: number("top_p") ?? 1,
            minP: number("min_p") ?? 0, repetitionPenalty: number("repetition_penalty") ?? 1,
            seed: seed ?? UInt64(record?["seed"]?.int ?? 0))
    }

    @Test func promptLookup() throws {
        for record in try cases("ngram", atLeast: 11) {
            let name = record["name"]?.string ?? ""
            let drafter = NgramDrafter()
            var sampler = DraftSampler(Sampler())
            var sequence: [Int] = []
            for (number, call) in try need(record["calls"]?.array, "calls").enumerated() {
                if let kept = call["rewind"]?.int {
                    sequence.removeSubrange(kept...)
                    drafter.rewind(to: kept)
                }
                sequence += try call.ints("tokens")
                let draft = drafter.propose(after: sequence, maxTokens: try call.int("max_tokens"), &sampler)
                #expect(try draft.tokenIds == call.ints("draft"), "\(name), call \(number)")
                #expect(try draft.confidence ?? [] == call.ints("confidence"), "\(name), call \(number)")
            }
        }
    }

    @Test func drawingDrafts() throws {
        for (record, seed) in zip(try cases("draft_sampler", atLeast: 3), Self.seeds) {
            let name = record["name"]?.string ?? ""
            var sampler = Sampler(try options(record["options"], seed: seed))
            try sampler.accept(all: record.ints("accept"))
            var drafting = DraftSampler(sampler)
            var random = Pcg32(seed: UInt64(try record.int("logits_seed")), stream: 1)
            for drafts in try need(record["drafts"]?.array, "drafts") {
                drafting.begin(as: sampler)
                let expected = try need(drafts.array, "drafts").compactMap(\.int)
                let found = try expected.map { _ in
                    try logits(&random).withUnsafeBufferPointer { row in try drafting.choose(row).id }
                }
                #expect(found == expected, "\(name)")
            }
            // The target's random numbers and what its penalty has seen are as before.
            #expect(try sampler.sample(logits(&random)) == record.int("then"), "\(name)")
        }
    }

    @Test func verification() throws {
        for record in try cases("verify", atLeast: 29) {
            let name = record["name"]?.string ?? ""
            var sampler = Sampler(try options(record["options"]))
            let seen = try record.ints("accept")
            try sampler.accept(all: seen)
            let before = sampler
            var random = Pcg32(seed: UInt64(try record.int("logits_seed")), stream: 1)
            let tokens = try record.ints("draft")
            let rows = try (0...tokens.count).flatMap { _ in try logits(&random) }
            let probabilities = try record["probabilities"]?.array?.map { pair -> [Weighted] in
                let lists = try need(pair.array, "pair")
                let (ids, weights) = (lists[0].array ?? [], lists[1].array ?? [])
                return zip(ids, weights).map { Weighted(id: $0.int ?? -1, weight: $1.number ?? -1) }
            }
            let found = try rows.withUnsafeBufferPointer { rows in
                try verify(
                    Draft(tokens, probabilities: probabilities), logits: rows, numRows: tokens.count + 1, &sampler,
                    ends: Set(record.ints("ends")))
            }
            #expect(try found == Verified(tokenIds: record.ints("token_ids"), accepted: record.int("accepted")), "\(name)")
            #expect(try Int(sampler.random.nextUInt32()) == record.int("next_u32"), "\(name)")
            // What the penalty has seen is as before: a greedy choice by it tells.
            for token in seen {
                try sampler.retract(token)
            }
            #expect(throws: LesonnxError.self) { try sampler.retract(seen[0]) }
            #expect(before.options == sampler.options)
        }
    }

    /// Broken logits end verification; what the penalty has seen is as before.
    @Test func brokenLogits() throws {
        var sampler = Sampler(try SamplingOptions(repetitionPenalty: 1.5))
        try sampler.accept(1)
        let rows: [Float] = [0, 9, 0, .nan, 0, 0, 0, 0, 0]
        #expect(throws: LesonnxError.self) {
            try rows.withUnsafeBufferPointer { try verify(Draft([1, 2]), logits: $0, numRows: 3, &sampler) }
        }
        try sampler.retract(1)
        #expect(throws: LesonnxError.self) { try sampler.retract(1) }
    }

    @Test func prices() throws {
        for record in try cases("pricing", atLeast: 5) {
            let name = record["name"]?.string ?? ""
            let isFree = try need(record["is_free"]?.bool, "is_free")
            let isDrawn = try need(record["is_drawn"]?.bool, "is_drawn")
            var pricing = Pricing()
            for (number, turn) in try need(record["turns"]?.array, "turns").enumerated() {
                let place = Comment(rawValue: "\(name), turn \(number)")
                let newBytes = try turn.ints("new_bytes")
                #expect(pricing.mayDraft == turn["may_draft"]?.bool, place)
                let asked = try pricing.ask(most: turn.int("most"), isFree: isFree, newBytes: newBytes)
                let confidence = turn["confidence"]?.array?.compactMap(\.int)
                let length = try pricing.choose(
                    drafted: turn.int("drafted"), confidence: confidence, isFree: isFree, isDrawn: isDrawn, newBytes: newBytes)
                try #require(try asked == turn.int("asked") && length == turn.int("chosen"), place)
                try pricing.passed(
                    rows: length + 1, passUs: turn.int("pass_us"), stallUs: turn.int("stall_us"),
                    readBytes: turn.int("read_bytes"), newBytes: newBytes, newTokens: turn.int("new_tokens"),
                    draftUs: turn["draft_us"]?.int)
                let judged = try turn.int("judged")
                if judged > 0 {
                    try pricing.judge(drafted: judged, accepted: turn.int("accepted"), confidence: confidence)
                }
                let (slot, odds) = try pair(turn, "odds")
                #expect(pricing.acceptance.odds(slot: slot, confidence: nil) == odds, place)
                let (value, ofValue) = try pair(turn, "confidence_odds")
                #expect(pricing.acceptance.odds(slot: 0, confidence: [value]) == ofValue, place)
                let expected = try turn.ints("expected_us")
                #expect(pricing.times.passUs(rows: expected[0], extraBytes: expected[1]) == expected[2], place)
            }
        }
    }

    private func pair(_ record: JSON, _ key: String) throws -> (Int, Int) {
        let values = try record.ints(key)
        return (values[0], values[1])
    }

    /// Sizes and times beyond all machines stay numbers.
    @Test func pricesBeyondAllNumbers() {
        var pricing = Pricing()
        let newBytes = Array(repeating: 1 << 46, count: 16)
        for turn in 0..<200 {
            _ = pricing.ask(most: 15, isFree: false, newBytes: newBytes)
            let length = pricing.choose(drafted: 15, confidence: nil, isFree: false, isDrawn: false, newBytes: newBytes)
            pricing.passed(
                rows: turn % 3 == 0 ? 1 : max(2, length + 1), passUs: 1 << 35, stallUs: 1 << 34, readBytes: turn % 2,
                newBytes: newBytes, newTokens: 1, draftUs: turn % 3 == 0 ? nil : 1 << 35)
        }
        #expect(!pricing.mayDraft)
    }

    @Test func whatRowsAreExpectedToRead() throws {
        for record in try cases("new_bytes", atLeast: 15) {
            let name = try need(record["trace"]?.string, "trace")
            let trace = try readJSON(testData.appending(path: "traces/\(name)"))
            var scheduler = try makeScheduler(trace)
            for event in try need(trace["events"]?.array, "events") {
                _ = try answer(&scheduler, event)
            }
            #expect(try scheduler.expectedNewBytes(rows: record.int("rows")) == record.ints("result"), "\(name)")
        }
    }

    /// In ten thousand verifications of drafts drawn from another distribution, tokens have the target's.
    @Test func theTargetsDistribution() throws {
        let target: [Float] = [1.5, 0.2, -0.7, 2.0, 0.9, -1.1]
        let drafter: [Float] = [0.1, 1.9, 0.3, 1.2, -0.5, 0.8]
        var sampler = Sampler(try SamplingOptions(temperature: 1, seed: 11))
        var drafting = DraftSampler(sampler)
        var counts = [Int](repeating: 0, count: target.count)
        let draws = 10_000
        for _ in 0..<draws {
            drafting.begin(as: sampler)
            let (id, distribution) = try drafter.withUnsafeBufferPointer { row in try drafting.choose(row) }
            let draft = Draft([id], probabilities: [try need(distribution, "distribution")])
            let found = try (target + target).withUnsafeBufferPointer { try verify(draft, logits: $0, numRows: 2, &sampler) }
            counts[found.tokenIds[0]] += 1
        }
        let expected = try sampler.distribution(target)
        let chiSquare = expected.reduce(0.0) { sum, token in
            let mean = Double(draws) * token.weight
            return sum + (Double(counts[token.id]) - mean) * (Double(counts[token.id]) - mean) / mean
        }
        // 5 degrees of freedom: above 20.5 once in a thousand seeds; the seed is fixed.
        #expect(chiSquare < 20.5, "\(counts)")
    }

    @Test func confidences() {
        let values = [-1, 0, 0.25, 0.5, 1, 7, .infinity, -.infinity, .nan]
        #expect(values.map(fixedConfidence) == [0, 0, 4096, 8192, 16384, 16384, 16384, 0, 0])
    }
}
