import Foundation
import Lesonnx
import LesonnxScheduler
import LesonnxStore
import Observation

/// What all screens share: the bundles, the one that is loaded, the benchmark.
@MainActor @Observable public final class AppModel {
    public let shelf: Shelf
    public let session = Session()
    public let benchmark = Benchmark()
    /// The share of all experts that the benchmark's caches hold: with all of them, no technique would have anything to do.
    public var benchmarkShare = 0.25

    private let folder: URL

    /// `folder` is where bundles lie; it is made where it is missing.
    public init(folder: URL) throws {
        self.folder = folder
        shelf = try Shelf(folder: folder)
    }

    /// Loads a bundle of the shelf, with as many experts in memory as fit; not while the benchmark has the memory.
    public func open(_ row: Shelf.Row) async {
        if benchmark.isRunning {
            shelf.problem = "the benchmark is running; stop it first"
            return
        }
        do {
            let bundle = try await shelf.bundle(named: row.name)
            var budget = bundle.expertBytes
            if case .fits(let bytes, _) = row.fit {
                budget = max(bytes, bundle.leastBudgetBytes)
            }
            await session.open(bundle, expertBudgetBytes: budget, memoryBudgetBytes: memoryBudget(for: bundle))
        } catch {
            shelf.problem = "\(error)"
        }
    }

    /// Deletes a bundle, closing it before where it is the one that is loaded.
    public func remove(_ name: String) async {
        if session.bundle?.directory.lastPathComponent == name {
            await session.close()
        }
        await shelf.remove(name)
    }

    /// Runs the ladder on the bundle that is loaded, which is closed before: it takes the memory that the ladder needs.
    public func runBenchmark() async {
        guard let bundle = session.bundle, !benchmark.isRunning else { return }
        let wanted = Int(Double(bundle.expertBytes) * benchmarkShare)
        let budget = min(session.expertBudgetBytes, max(bundle.leastBudgetBytes, wanted))
        let (full, memory) = (session.expertBudgetBytes, session.memoryBudgetBytes)
        await session.close()
        benchmark.run(bundle, expertBudgetBytes: budget)
        await benchmark.settle()
        await session.open(bundle, expertBudgetBytes: full, memoryBudgetBytes: memory)
    }

    /// For a bundle with eyes what this app may take in all, so that experts give way while pictures are read; else nil.
    private func memoryBudget(for bundle: ModelBundle) -> Int? {
        if bundle.manifest.vision == nil {
            return nil
        }
        return Memory.currentBytes() + DeviceOffer.current(for: folder).memoryBytes / 10 * 9
    }
}
