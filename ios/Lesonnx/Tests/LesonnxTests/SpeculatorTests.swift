import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

extension RuntimeTests {
    /// Drafting as a whole: tokens, ends, states and averages of plain decoding, whoever drafts and whatever is right.
    @Suite struct Speculators {
        static let text = "CREATE TABLE t (a integer, b integer);\nCREATE TABLE u (a integer, b integer);\nCREATE"
        static let sampled = try! SamplingOptions(temperature: 0.9, topP: 0.95, repetitionPenalty: 1.1, seed: 3)
        /// States that go back in each way: attention alone, dense layers in the head, convolutions, a delta rule.
        static let families = [
            "qwen3_moe-float", "deepseek_v3-float", "lfm2_moe-float", "qwen3_next-float", "qwen3_next-portable-float",
        ].filter(Fixtures.isRunnable)

        @Test("drafts that are chosen give the tokens without drafts", arguments: ["ngram", "draft-model", "dspark", "oracle"])
        func sample(name: String) throws {
            let drafting = try Drafting("sample-dspark-float", text: Self.text)
            let runner = drafting.runner
            defer { runner.close() }
            for sampling in [.greedy, Self.sampled] {
                let isDrawn = sampling.temperature > 0 && (name == "draft-model" || name == "dspark")
                let plain = try drafting.run(drafting.generator(48, sampling))
                let (sequence, odds) = (runner.tokenIds, drafting.odds)
                _ = try drafting.run(drafting.generator(48, sampling))
                let again = drafting.odds
                for length in [1, 4, 15] {
                    let speculator = Speculator(
                        runner, try drafter(name, drafting, plain.report.tokenIds), pricing: Always(length: length))
                    defer { speculator.close() }
                    let found = try drafting.run(drafting.generator(48, sampling), speculator)
                    let drafts = try #require(found.report.drafts)
                    #expect(drafts.passes > 0 && drafts.numAccepted <= drafts.numDrafted)
                    #expect(drafts.numAccepted > 0 || sampling.temperature > 0)
                    if isDrawn {
                        #expect(found.report.tokenIds.count == 48 && found.report.finishReason == .length)
                        continue
                    }
                    #expect(found.report.tokenIds == plain.report.tokenIds, "\(name), \(length)")
                    #expect(found.text == plain.text && runner.tokenIds == sequence)
                }
                // Each run teaches the policy the same rows, whoever drafts: rejected drafts taught it nothing.
                if name == "oracle" && sampling == .greedy {
                    let fresh = try Drafting("sample-dspark-float", text: Self.text)
                    defer { fresh.runner.close() }
                    let oracle = try self.drafter("oracle", fresh, plain.report.tokenIds)
                    for expected in [odds, again] {
                        _ = try fresh.run(fresh.generator(48), Speculator(fresh.runner, oracle, pricing: Always()))
                        #expect(fresh.odds == expected)
                    }
                }
            }
        }

        private func drafter(_ name: String, _ drafting: Drafting, _ tokenIds: [Int]) throws -> any Drafter {
            let environment = try OrtEnvironment.shared(numThreads: nil)
            switch name {
            case "ngram": return NgramDrafter()
            case "draft-model": return try DraftModelDrafter(for: drafting.bundle, drafting.bundle, .auto, environment)
            case "dspark": return try DSparkDrafter(drafting.bundle, environment)
            default: return oracle(drafting, tokenIds, wrong: 30)
            }
        }

        private func oracle(_ drafting: Drafting, _ tokenIds: [Int], wrong: UInt32) -> Oracle {
            Oracle(tokenIds, after: drafting.prompt.count, wrong: wrong, vocabSize: drafting.bundle.manifest.model.vocabSize)
        }

        @Test("states of every kind go back to the last right token", arguments: families, [UInt32(0), 50, 100])
        func states(name: String, wrong: UInt32) throws {
            let drafting = try Drafting(name, share: 4)
            defer { drafting.runner.close() }
            let plain = try drafting.run(drafting.generator(24)).report.tokenIds
            let sequence = drafting.runner.tokenIds
            let speculator = Speculator(drafting.runner, oracle(drafting, plain, wrong: wrong), pricing: Always(length: 6))
            let found = try drafting.run(drafting.generator(24), speculator)
            #expect(found.report.tokenIds == plain && drafting.runner.tokenIds == sequence)
            let drafts = try #require(found.report.drafts)
            #expect(wrong > 0 ? drafts.numAccepted < drafts.numDrafted : drafts.numAccepted == drafts.numDrafted)
            // What the runner holds is what plain decoding holds: the next generation goes on from it.
            let longer = drafting.prompt + plain + [9, 8, 7]
            let next = try drafting.run(drafting.generator(6, reuses: true, after: longer))
            #expect(next.report.reusedTokens == drafting.prompt.count + 23)
        }

        @Test("a generation ends inside accepted drafts exactly where plain decoding ends", arguments: ["eos", "stop", "length", "left"])
        func ends(what: String) throws {
            let drafting = try Drafting("sample-dspark-float")
            let runner = drafting.runner
            defer { runner.close() }
            let all = try drafting.run(drafting.generator(40)).report.tokenIds
            let speculator = Speculator(runner, oracle(drafting, all, wrong: 0), pricing: Always(length: 6))
            // A token that is there for the first time, and is not the last of a pass's seven.
            let place = try #require((9..<30).first { $0 % 7 != 0 && !all[..<$0].contains(all[$0]) })
            func generator() throws -> Generator {
                switch what {
                case "eos": return try drafting.generator(40, eos: all[place])
                case "stop":
                    let text = try drafting.run(drafting.generator(40)).text
                    return try drafting.generator(40, stop: [String(text.dropFirst(20).prefix(4))])
                default: return try drafting.generator(what == "length" ? 17 : 40)
                }
            }
            if what == "left" {
                // Whoever stops asking in the middle of accepted drafts, and begins anew.
                var generator = try generator()
                while try generator.runChunk(runner, speculator) {}
                for _ in 0..<4 {
                    _ = try generator.next(runner, speculator)
                }
                #expect(runner.numTokens > drafting.prompt.count + 3)
                try generator.leave(runner)
                #expect(runner.tokenIds == drafting.prompt + all.prefix(3))
                #expect(try drafting.run(drafting.generator(40, reuses: true), speculator).report.tokenIds == all)
                return
            }
            let plain = try drafting.run(generator())
            let sequence = runner.tokenIds
            let found = try drafting.run(generator(), speculator)
            #expect(found.report.tokenIds == plain.report.tokenIds && found.text == plain.text)
            #expect(found.report.finishReason == plain.report.finishReason && found.report.finishReason?.rawValue == what)
            #expect(runner.tokenIds == sequence)
            #expect(try #require(found.report.drafts).numAccepted > 0)
        }

        @Test("a read that fails in the middle of a pass with drafts ends it in one line")
        func failingRead() throws {
            var failing: Faults.FailingReads?
            let drafting = try Drafting("sample-dspark-float", text: Self.text, schedule: .onDemand) {
                let made = Faults.FailingReads($0, expert: nil, failures: .max)
                made.isBroken = false
                failing = made
                return made
            }
            let runner = drafting.runner
            defer { runner.close() }
            let plain = try drafting.run(drafting.generator(20)).report.tokenIds
            let speculator = Speculator(runner, oracle(drafting, plain, wrong: 0), pricing: Always(length: 5))
            var generator = try drafting.generator(20)
            while try generator.runChunk(runner, speculator) {}
            _ = try generator.next(runner, speculator)
            let before = runner.tokenIds
            failing?.isBroken = true
            do {
                _ = try generator.next(runner, speculator)
                Issue.record("nothing failed")
            } catch LesonnxError.load(let found) {
                #expect(found.hasSuffix("cannot be loaded: the disk says no") && !found.contains("\n"), "\(found)")
            }
            // The pass has changed nothing.
            #expect(runner.tokenIds == before)
            try generator.leave(runner)
            #expect(runner.tokenIds == before)
        }

        @Test("a drafter that the bundle lacks, or one that is not its own, is refused in one line")
        func refused() async throws {
            let bundle = try Fixtures.bundle("sample-int4")
            let other = Fixtures.folder.appending(path: "bundles/qwen3_moe-float")
            func refusal(_ change: (inout LoadOptions) -> Void) async -> String {
                var options = LoadOptions()
                change(&options)
                do {
                    _ = try await Model.load(bundle, options)
                    return "nothing was refused"
                } catch {
                    #expect((error as? LesonnxError)?.isInput == true)
                    return "\(error)"
                }
            }
            #expect(await refusal { $0.draft = .draftModel } == "drafter draft-model needs the bundle that drafts: give draftModel")
            #expect(
                await refusal { $0.draftModel = other } == "a draft model was given, but the drafter is none: expected draft-model")
            let wrong = await refusal { $0.draft = .draftModel; $0.draftModel = other }
            #expect(wrong.contains("bundles/qwen3_moe-float: cannot draft: its vocabulary has") && wrong.contains("the target's 2048"))
            #expect(await refusal { $0.draft = .dspark }.hasSuffix("sample-int4: this bundle has no dspark drafter; export with --drafter CHECKPOINT"))
            #expect(await refusal { $0.draft = .mtp }.hasSuffix("sample-int4: this bundle has no mtp drafter"))
            let folder = try Fixtures.copy("sample-int4")
            defer { try? FileManager.default.removeItem(at: folder) }
            let file = folder.appending(path: "tokenizer/tokenizer.json")
            try (Data(contentsOf: file) + Data(" ".utf8)).write(to: file)
            #expect(
                await refusal { $0.draft = .draftModel; $0.draftModel = folder }.contains("cannot draft: its tokenizer is not the same"))
        }
    }
}
