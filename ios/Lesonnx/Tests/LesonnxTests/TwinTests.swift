import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

extension RuntimeTests {
    /// Twins of dense parts, on the CPU provider: no accelerator is here.
    @Suite struct TwinSuite {
        private func environment() throws -> OrtEnvironment { try OrtEnvironment.shared(numThreads: 2) }

        @Test("logits and tokens by twins are Python's, beyond what their caches hold, and after a rewind", arguments: Fixtures.twins)
        func parity(name: String) throws {
            let bundle = try Fixtures.bundle(name)
            let (reference, hasBits) = try Fixtures.reference(name)
            try #require(reference.twins.count == 2)
            for test in reference.twins {
                for (schedule, budget) in [(Schedule.les, bundle.expertBytes / 2), (.onDemand, bundle.leastBudgetBytes)] {
                    let runner = try Runners.make(
                        bundle, reference, test.engine, schedule, max(budget, bundle.leastBudgetBytes), accelerate: .cpu)
                    defer { runner.close() }
                    let record = try #require(bundle.manifest.twins)
                    #expect(runner.twins?.widths.keys.sorted() == [1, 8] && runner.twins?.notes == [])
                    #expect(runner.states.capacity(for: 1) == record.capacityTokens)
                    let logits = hasBits ? try reference.logits(test) : nil
                    try Runners.compare(runner, test, logits, "\(name) \(test.name) \(schedule.rawValue)")
                    #expect(runner.numTokens > record.capacityTokens && runner.states.capacityTokens > record.capacityTokens)
                }
            }
        }

        @Test("with an accelerator that is not there, the plain parts run and a line says so")
        func missingProvider() throws {
            let bundle = try Fixtures.bundle("qwen3_moe-twins-ios-float")
            let twins = try Twins(bundle, environment(), .auto, target: .ios)
            #expect(twins.widths.isEmpty && twins.capacityTokens == 0)
            #expect(twins.notes == ["the installed ONNX Runtime has no CoreMLExecutionProvider: dense parts run without it"])
            // No list, no twins, no word.
            let here = try Twins(bundle, environment(), .auto, target: .desktop)
            #expect(here.widths.isEmpty && here.notes == [])
            #expect(try Twins(bundle, environment(), .off, target: .ios).notes == [])
        }

        @Test("where a provider does not take a twin, the next one is tried, and then the plain parts run")
        func providerThatFails() async throws {
            let providers = try environment().availableProviders()
            #expect(providers.contains(Provider.cpu.name))
            let folder = try Fixtures.copy("qwen3_moe-twins-ios-float")
            defer { try? FileManager.default.removeItem(at: folder) }
            let file = folder.appending(path: "manifest.json")
            let text = try String(contentsOf: file, encoding: .utf8)
            /// The manifest with this for the name of the twins' provider, for this host's target.
            func write(_ name: String) throws {
                let renamed = text.replacing("CoreMLExecutionProvider", with: name)
                    .replacing("\"ios\"", with: "\"\(Target.here.rawValue)\"")
                try Data(renamed.utf8).write(to: file)
            }
            // Listed as a provider it is tried like any other, and takes all of a twin.
            try write(Provider.cpu.name)
            #expect(try Twins(ModelBundle(directory: folder), environment(), .auto).widths.keys.sorted() == [1, 8])
            guard let other = providers.first(where: { $0 != Provider.cpu.name }) else { return }
            // One that takes no node of it: then nothing of a twin may run on the CPU provider instead.
            try write(other)
            var options = LoadOptions()
            options.numThreads = 2
            let model = try await Model.load(folder, options)
            let notes = await model.notes
            #expect(notes.count == 2 && notes.allSatisfy { $0.contains("tokens do not use \(other): ") && !$0.contains("\n") }, "\(notes)")
            let (reference, _) = try Fixtures.reference("qwen3_moe-twins-ios-float")
            let test = try #require(reference.cases.first { $0.name == "greedy-kernel" })
            let generation = try await model.generate(
                .ids(test.promptIds), GenerationOptions(maxNewTokens: test.tokenIds.count, ignoresEos: true))
            _ = try await generation.text()
            #expect(await generation.report.tokenIds == test.tokenIds)
            await model.close()
        }

        @Test("a memory budget counts twins, and drafts run on them")
        func budgetAndDrafts() async throws {
            var options = LoadOptions()
            options.numThreads = 2
            options.accelerate = .cpu
            options.memoryBudgetBytes = 1 << 30
            let (reference, _) = try Fixtures.reference("qwen3_moe-twins-ios-float")
            let test = try #require(reference.twins.first { $0.name == "twins-greedy" })
            let model = try await Model.load(Fixtures.bundle("qwen3_moe-twins-ios-float"), options)
            let wanted = GenerationOptions(maxNewTokens: test.tokenIds.count, ignoresEos: true)
            let generation = try await model.generate(.ids(test.promptIds), wanted)
            _ = try await generation.text()
            #expect(await generation.report.tokenIds == test.tokenIds)
            await model.close()
            options.draft = .ngram
            let drafting = try await Model.load(Fixtures.bundle("qwen3_moe-twins-ios-float"), options)
            let drafted = try await drafting.generate(.ids(test.promptIds), wanted)
            _ = try await drafted.text()
            #expect(await drafted.report.tokenIds.count == test.tokenIds.count)
            await drafting.close()
            await #expect(throws: LesonnxError.self) { try await Model.load(Fixtures.bundle("sample-int4"), options) }
        }
    }
}
