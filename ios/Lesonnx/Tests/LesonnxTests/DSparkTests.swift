import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

extension RuntimeTests {
    /// The bundle's own drafter against what Python's drafted, and models that draft.
    @Suite struct DSpark {
        @Test("drafts, confidences and accepted tokens are Python's, pass by pass", arguments: ["sample-dspark-float", "sample-dspark-int4"])
        func passes(name: String) throws {
            let bundle = try Fixtures.bundle(name)
            let (reference, hasBits) = try Fixtures.reference(name)
            let expected = try #require(reference.drafter)
            let runner = try Runners.make(bundle, reference, .kernel, .les, bundle.expertBytes)
            let drafter = try DSparkDrafter(bundle, OrtEnvironment.shared(numThreads: nil))
            runner.layerReader = drafter
            defer { drafter.close(); runner.close() }
            var greedy = Sampler()
            var (target, sequence) = (Sampler(expected.sampling), expected.promptIds)
            try target.accept(all: sequence)
            var (drawing, choosing) = (DraftSampler(target), DraftSampler(greedy))
            func take(_ ids: [Int]) throws {
                sequence += ids
                try target.accept(all: ids)
            }
            try take([greedy.sample(UnsafeBufferPointer(runner.prefill(sequence)[Float.self]))])
            for (number, pass) in expected.passes.enumerated() {
                drawing.begin(as: target)
                let drawn = try drafter.propose(after: sequence, maxTokens: drafter.maxTokens, &drawing)
                choosing.begin(as: greedy)
                let draft = try drafter.propose(after: sequence, maxTokens: expected.draftTokens, &choosing)
                #expect(drawn.probabilities?.count == drafter.maxTokens && draft.probabilities == nil)
                #expect(draft.tokenIds == pass.drafted, "pass \(number)")
                if hasBits {
                    #expect(drawn.tokenIds == expected.sampled[number], "pass \(number)")
                    #expect(draft.confidence == pass.confidence, "pass \(number)")
                }
                let ids = [sequence[sequence.count - 1]] + draft.tokenIds
                let logits = try runner.step(ids, logitRows: Array(ids.indices), numDrafts: draft.tokenIds.count)
                let rows = UnsafeBufferPointer(logits[Float.self])
                let verified = try verify(draft, logits: rows, numRows: ids.count, &greedy)
                #expect(verified.accepted == pass.accepted, "pass \(number)")
                try runner.keep(rows: 1 + verified.accepted)
                try take(verified.tokenIds)
            }
            #expect(Array(sequence.dropFirst(expected.promptIds.count)) == expected.tokenIds)
        }

        @Test("what layers give is asked for only where someone reads it, in prompts of any length")
        func longPrompts() throws {
            let bundle = try Fixtures.bundle("sample-dspark-float")
            let (reference, _) = try Fixtures.reference("sample-dspark-float")
            let ids = (0..<150).map { 3 + (7919 * $0) % 2000 }
            var drafts: [[Int]] = []
            // Chunks that are kept as rows, some that are projected at once, and single tokens.
            for chunk in [16, 100, 1] {
                let runner = try Runners.make(bundle, reference, .kernel, .les, bundle.expertBytes, chunk: chunk)
                let drafter = try DSparkDrafter(bundle, OrtEnvironment.shared(numThreads: nil))
                defer { drafter.close(); runner.close() }
                runner.layerReader = drafter
                _ = try runner.prefill(Array(ids.dropLast()))
                #expect(drafter.numTokens == 149)
                var sampler = DraftSampler(Sampler())
                drafts.append(try drafter.propose(after: ids, maxTokens: 15, &sampler).tokenIds)
                // A rewind forgets what lies behind, and drafts again from there.
                try runner.rewind(to: 90)
                _ = try runner.prefill(Array(ids[90..<149]))
                #expect(try drafter.propose(after: ids, maxTokens: 15, &sampler).tokenIds == drafts.last)
                #expect(throws: LesonnxError.self) { try drafter.propose(after: ids + [1, 2], maxTokens: 3, &sampler) }
                #expect(throws: LesonnxError.self) { try drafter.observe(position: 200, Tensor(.float32, [1, 4])) }
            }
            #expect(drafts[0].count == bundle.manifest.drafter?.blockSize && Set(drafts).count == 1)
        }

        @Test("a model that drafts gives the tokens of one that does not", arguments: [DrafterName.ngram, .draftModel, .dspark])
        func models(draft: DrafterName) async throws {
            let bundle = try Fixtures.bundle("sample-dspark-float")
            let (reference, _) = try Fixtures.reference("sample-dspark-float")
            let test = try #require(reference.cases.first { $0.name == "greedy-kernel" })
            var options = LoadOptions()
            options.numThreads = 2
            options.memoryBudgetBytes = 1 << 30
            options.expertBudgetBytes = bundle.expertBytes / 2
            options.draft = draft
            options.draftModel = draft == .draftModel ? bundle.directory : nil
            let model = try await Model.load(bundle, options)
            for _ in 0..<3 {
                let wanted = GenerationOptions(maxNewTokens: test.tokenIds.count, ignoresEos: true)
                let generation = try await model.generate(.ids(test.promptIds), wanted)
                #expect(try await generation.text() == test.text)
                let report = await generation.report
                #expect(report.tokenIds == test.tokenIds)
                let drafts = try #require(report.drafts)
                #expect(drafts.numAccepted <= drafts.numDrafted && drafts.accepted.count == maxDraftTokens)
            }
            // What is cancelled after a few tokens leaves nothing behind.
            let generation = try await model.generate(.ids(test.promptIds), GenerationOptions(maxNewTokens: 200))
            var tokens = generation.tokens.makeAsyncIterator()
            for _ in 0..<5 {
                _ = try await tokens.next()
            }
            let again = try await model.generate(.ids(test.promptIds), GenerationOptions(maxNewTokens: 10, ignoresEos: true))
            #expect(await model.numTokens == test.promptIds.count + 4)
            _ = try await again.text()
            #expect(await again.report.tokenIds == Array(test.tokenIds.prefix(10)))
            await model.close()
        }
    }
}
