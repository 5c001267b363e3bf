import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

extension RuntimeTests {
    /// What happens when reading goes wrong.
    @Suite struct Faults {
        /// An engine whose reads of some expert, or of all of them (nil), fail once `isBroken`, as a disk's would; everything else is
        /// the engine's own.
        final class FailingReads: ExpertEngine, @unchecked Sendable {
            let inner: any ExpertEngine
            let expert: Int?
            /// Set between two steps.
            var isBroken = true
            private let lock = NSLock()
            private var left: Int
            private(set) var reads = 0

            init(_ inner: any ExpertEngine, expert: Int?, failures: Int) {
                (self.inner, self.expert, left) = (inner, expert, failures)
            }

            var name: String { inner.name }
            var memoryPerByte: Double { inner.memoryPerByte }
            func resize(_ slabBytes: [Int]) throws { try inner.resize(slabBytes) }
            func compute(_ experts: [Expert], _ work: LayerWork) throws { try inner.compute(experts, work) }
            func evict(_ expert: Expert) { inner.evict(expert) }
            func close() { inner.close() }

            func load(_ expert: Expert, slab: Int, offsetBytes: Int) throws -> Int {
                let fails = lock.withLock {
                    guard isBroken && expert.number == self.expert ?? expert.number else { return false }
                    reads += 1
                    left -= 1
                    return left >= 0
                }
                if fails {
                    throw LesonnxError.load("the disk says no")
                }
                return try inner.load(expert, slab: slab, offsetBytes: offsetBytes)
            }
        }

        @Test("a read that fails once is repeated; twice, the step ends in one line", arguments: [EngineChoice.kernel, .session])
        func failingRead(engine: EngineChoice) throws {
            let bundle = try Fixtures.bundle("sample-int4")
            let (reference, _) = try Fixtures.reference("sample-int4")
            let test = try #require(reference.cases.first { $0.engine == engine })
            // The first expert that this prompt's first layer asks for.
            let probe = try Runners.make(bundle, reference, engine, .onDemand, bundle.leastBudgetBytes)
            let expected = Array(try probe.prefill(test.promptIds)[UInt32.self])
            probe.close()
            var victim = 0
            for number in 0..<bundle.manifest.model.numExperts {
                var failing: FailingReads?
                let runner = try Runners.make(bundle, reference, engine, .onDemand, bundle.leastBudgetBytes) {
                    let made = FailingReads($0, expert: number, failures: 1)
                    failing = made
                    return made
                }
                defer { runner.close() }
                let logits = Array(try runner.prefill(test.promptIds)[UInt32.self])
                #expect(logits == expected)
                if failing?.reads == 2 {
                    victim = number
                    break
                }
                #expect(failing?.reads == 0)
            }
            let runner = try Runners.make(bundle, reference, engine, .les, bundle.expertBytes) {
                FailingReads($0, expert: victim, failures: 2)
            }
            defer { runner.close() }
            #expect(message { _ = try runner.prefill(test.promptIds) } == "layer 0 expert \(victim) cannot be loaded: the disk says no")
        }

        @Test("a pack that is cut off is refused at once, or at the read", arguments: [EngineChoice.kernel, .session])
        func truncatedPack(engine: EngineChoice) throws {
            let folder = try Fixtures.copy("sample-int4")
            defer { try? FileManager.default.removeItem(at: folder) }
            let bundle = try ModelBundle(directory: folder)
            let (reference, _) = try Fixtures.reference("sample-int4")
            let test = try #require(reference.cases.first { $0.engine == engine })
            let runner = try Runners.make(bundle, reference, engine, .onDemand, bundle.leastBudgetBytes)
            defer { runner.close() }
            let pack = try bundle.packFile(layerIdx: bundle.manifest.expertLayers[2].layerIdx)
            let handle = try FileHandle(forWritingTo: pack)
            try handle.truncate(atOffset: 1000)
            try handle.close()
            let failure = message { _ = try runner.prefill(test.promptIds) }
            #expect(failure.hasPrefix("layer 2 expert") && failure.contains("cannot be loaded"), "\(failure)")
            #expect(failure.contains("ends at byte"), "\(failure)")
            // Nothing runs after a step that was broken off.
            #expect(message { _ = try runner.step([5], logitRows: [0]) } == failure)
            #expect(message { _ = try ModelBundle(directory: folder) }.contains("has 1000 bytes, expected"))
        }

        @Test("a dense part that is broken names its file")
        func brokenPart() throws {
            let folder = try Fixtures.copy("qwen3_moe-float")
            defer { try? FileManager.default.removeItem(at: folder) }
            try Data("no model".utf8).write(to: folder.appending(path: "dense/head.onnx"))
            let bundle = try ModelBundle(directory: folder)
            let (reference, _) = try Fixtures.reference("qwen3_moe-float")
            let failure = message {
                try Runners.make(bundle, reference, .kernel, .les, bundle.expertBytes).close()
            }
            #expect(failure.contains("dense/head.onnx: ONNX Runtime does not take it"), "\(failure)")
        }

        private func message(_ body: () throws -> Void) -> String {
            do {
                try body()
                return "nothing failed"
            } catch {
                return "\(error)"
            }
        }
    }
}
