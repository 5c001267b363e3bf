import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

extension RuntimeTests {
    /// States of fixed shape: how far a sequence goes back, and what is exact about it.
    @Suite struct States {
        /// Tokens of a step, of which so many stay.
        typealias Step = (ids: [Int], kept: Int)

        private func runner(_ name: String, engine: EngineChoice = .kernel, chunk: Int? = nil) throws -> Runner {
            let bundle = try Fixtures.bundle(name)
            let (reference, _) = try Fixtures.reference(name)
            return try Runners.make(bundle, reference, engine, .les, bundle.expertBytes / 2, chunk: chunk)
        }

        private func prompt(_ count: Int, vocabSize: Int = 199) -> [Int] { (0..<count).map { (7 * $0 * $0 + 3) % vocabSize } }

        private func bits(_ logits: Tensor, rows: Int) -> [UInt32] {
            withExtendedLifetime(logits) { Array(logits[UInt32.self].prefix(rows * (logits.shape.last ?? 0))) }
        }

        /// The logits of the tokens that stay.
        private func run(_ script: [Step], _ runner: Runner) throws -> [[UInt32]] {
            try script.map { step in
                let before = runner.numTokens
                let logits = try runner.step(step.ids, logitRows: Array(step.ids.indices))
                let kept = bits(logits, rows: step.kept)
                try runner.rewind(to: before + step.kept)
                return kept
            }
        }

        /// A first step, then steps of 1 to 16 tokens; `rejected` draws those that do not stay, `seed` all else.
        private func script(seed: UInt64, rejected: UInt64) -> [Step] {
            var random = Pcg32(seed: seed)
            var other = Pcg32(seed: rejected)
            func below(_ bound: UInt32, _ random: inout Pcg32) -> Int { Int(random.nextUInt32() % bound) }
            var steps: [Step] = [(prompt(24), 24)]
            for _ in 0..<12 {
                let count = 1 + below(UInt32(BundleManifest.rewindableTokens), &random)
                let kept = below(UInt32(count + 1), &random)
                let ids = (0..<count).map { $0 < kept ? below(199, &random) : below(199, &other) }
                steps.append((ids, kept))
            }
            return steps
        }

        @Test("what was taken back leaves no trace, bit for bit", arguments: Fixtures.recurrent + ["smallthinker-float"])
        func noTrace(name: String) throws {
            for seed in 0..<3 as Range<UInt64> {
                let (one, other) = (try runner(name), try runner(name))
                defer { one.close(); other.close() }
                let (left, right) = (script(seed: seed, rejected: 100), script(seed: seed, rejected: 200))
                #expect(left.map(\.ids) != right.map(\.ids))
                #expect(try run(left, one) == run(right, other))
                #expect(one.numTokens == left.reduce(0) { $0 + $1.kept } && one.tokenIds == other.tokenIds)
            }
        }

        @Test("what stays is what the tokens give, one at a time", arguments: Fixtures.recurrent)
        func whatStays(name: String) throws {
            let (one, other) = (try runner(name), try runner(name, engine: .session, chunk: 1))
            defer { one.close(); other.close() }
            let steps = script(seed: 7, rejected: 8)
            let found = try run(steps, one).joined().map { Float(bitPattern: $0) }
            let kept = steps.flatMap { $0.ids.prefix($0.kept) }
            #expect(one.tokenIds == kept)
            // Other widths, so not bit for bit.
            let expected = bits(try other.prefill(kept, allLogits: true), rows: kept.count).map { Float(bitPattern: $0) }
            #expect(found.count == expected.count)
            let worst = zip(found, expected).map { abs($0 - $1) }.max() ?? .infinity
            #expect(worst < 1e-3, "\(worst)")
        }

        @Test("inside a step one may go back again", arguments: Fixtures.recurrent)
        func again(name: String) throws {
            let ids = prompt(34)
            var seen: [[UInt32]] = []
            for path in [[31, 26, 26, 22], [22]] {
                let runner = try runner(name)
                defer { runner.close() }
                _ = try runner.step(Array(ids[..<20]), logitRows: [])
                _ = try runner.step(Array(ids[20...]), logitRows: [])
                for numTokens in path {
                    try runner.rewind(to: numTokens)
                    #expect(runner.numTokens == numTokens && runner.tokenIds.count == numTokens)
                }
                seen.append(bits(try runner.step(Array(ids[22..<30]), logitRows: [7]), rows: 1))
            }
            #expect(seen[0] == seen[1])
        }

        @Test("out of reach is one clear error that changes nothing", arguments: Fixtures.recurrent)
        func outOfReach(name: String) throws {
            let runner = try runner(name)
            defer { runner.close() }
            func refusal(_ numTokens: Int) -> String {
                do {
                    try runner.rewind(to: numTokens)
                    return "nothing was refused"
                } catch {
                    #expect((error as? LesonnxError)?.isInput == true)
                    return "\(error)"
                }
            }
            let ids = prompt(24)
            let fresh = bits(try runner.prefill(ids), rows: 1)
            #expect(
                refusal(23)
                    == "cannot rewind to 23 tokens: the states of this model go back to 0 or 24 tokens, or to 0")
            _ = try runner.step(Array(ids[..<5]), logitRows: [])
            #expect(
                refusal(23)
                    == "cannot rewind to 23 tokens: the states of this model go back to 24 to 29 tokens, or to 0")
            #expect(runner.numTokens == 29)
            try runner.rewind(to: 24)
            #expect(refusal(23).contains("go back to 24 to 24 tokens"))
            // 0 is always reached, and is zero: the same logits come again.
            try runner.rewind(to: 0)
            #expect(bits(try runner.prefill(ids), rows: 1) == fresh)
            // The state before a wide step is still there.
            _ = try runner.step(prompt(20), logitRows: [])
            #expect(refusal(30).contains("go back to 24 or 44 tokens"))
            try runner.rewind(to: 24)
            #expect(runner.tokenIds == ids)
        }

        @Test("a prompt shares with the sequence only what can be reached", arguments: Fixtures.recurrent)
        func commonBeginning(name: String) throws {
            let bundle = try Fixtures.bundle(name)
            let model = bundle.manifest.model
            let (one, other) = (try runner(name), try runner(name))
            defer { one.close(); other.close() }
            func generate(_ prompt: [Int], _ runner: Runner, reuses: Bool) throws -> GenerationReport {
                let options = GenerationOptions(maxNewTokens: 6, ignoresEos: true)
                var generator = try Generator(
                    prompt, options, model, maxTokens: model.maxPositionEmbeddings, decoding: nil, reuses: reuses)
                while try generator.runChunk(runner, nil) {}
                while try generator.next(runner, nil) != nil {}
                return generator.report
            }
            let first = prompt(23)
            let answer = try generate(first, one, reuses: true)
            #expect(answer.reusedTokens == 0)
            // The last token is sampled and not run: the sequence is all but it.
            let second = first + answer.tokenIds + [9, 8, 7]
            let longer = try generate(second, one, reuses: true)
            #expect(longer.reusedTokens == first.count + answer.tokenIds.count - 1)
            // What differs earlier is computed from the start, and gives what a fresh sequence gives.
            let third = Array(second.prefix(25)) + [5, 4, 3]
            let edited = try generate(third, one, reuses: true)
            #expect(edited.reusedTokens == 0)
            #expect(try generate(third, other, reuses: false).tokenIds == edited.tokenIds)
        }

        @Test("the beginning of a wide step is a common beginning too", arguments: Fixtures.recurrent)
        func beginningOfAStep(name: String) throws {
            let runner = try runner(name)
            defer { runner.close() }
            let ids = prompt(50)
            _ = try runner.step(Array(ids[..<20]), logitRows: [])
            _ = try runner.step(Array(ids[20...]), logitRows: [])
            #expect(runner.commonTokens(ids + [1]) == 50 && runner.commonTokens(Array(ids[..<40])) == 20)
            #expect(runner.commonTokens(Array(ids[..<20])) == 0)
            #expect(runner.states.reachable(20) == 20)
        }
    }
}
