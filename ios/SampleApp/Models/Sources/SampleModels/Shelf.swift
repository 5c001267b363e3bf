import Foundation
import LesonnxScheduler
import LesonnxStore
import Observation

/// The bundles on the device, and what is being brought to it. For the main actor, as all that screens show.
@MainActor @Observable public final class Shelf {
    /// A bundle that is there.
    public struct Row: Identifiable, Equatable, Sendable {
        public var name: String
        /// What it is, in a line: family, size, bits.
        public var summary: String
        /// Whether it fits; nil where it cannot be opened, and `summary` says why.
        public var fit: Fit?
        public var chats: Bool

        public var id: String { name }
    }

    /// What is under way.
    public enum Work: Equatable, Sendable {
        case importing(name: String, doneBytes: Int)
        case fetching(name: String, doneBytes: Int, totalBytes: Int)
    }

    /// How long a conversation the fit check counts on.
    public nonisolated static let contextTokens = 4096

    public private(set) var rows: [Row] = []
    /// Downloads that were broken off.
    public private(set) var partialNames: [String] = []
    public private(set) var work: Work?
    /// The last thing that went wrong, in a line.
    public var problem: String?

    private let store: BundleStore
    private var task: Task<Void, Never>?

    public init(folder: URL) throws {
        store = try BundleStore(folder: folder)
    }

    /// Looks again at what is there.
    public func refresh() async {
        let store = store
        let found = await Task.detached { () -> ([Row], [String]) in
            let names = (try? store.names()) ?? []
            return (names.map { Self.row($0, store) }, (try? store.partialNames()) ?? [])
        }.value
        (rows, partialNames) = found
    }

    private nonisolated static func row(_ name: String, _ store: BundleStore) -> Row {
        do {
            let bundle = try store.bundle(named: name)
            let needs = BundleNeeds(bundle.manifest, try Checksums(of: bundle.directory), contextTokens: contextTokens)
            let facts = bundle.manifest.model
            let summary =
                "\(facts.modelType), \(formatBytes(needs.diskBytes)), experts in \(bundle.manifest.expertBits.map(String.init).joined(separator: ", ")) bits"
            return Row(
                name: name, summary: summary, fit: Fit(needs, on: .current(for: store.folder), isStored: true),
                chats: bundle.manifest.tokenizer?.chatFormat != nil)
        } catch {
            return Row(name: name, summary: "\(error)", fit: nil, chats: false)
        }
    }

    /// Opens a bundle that is there. Throws as `ModelBundle`.
    public func bundle(named name: String) async throws -> ModelBundle {
        let store = store
        return try await Task.detached { try store.bundle(named: name) }.value
    }

    // MARK: bringing bundles

    /// Copies a bundle from a folder that a person picked.
    public func importBundle(from source: URL) {
        let tell = teller()
        begin(.importing(name: source.lastPathComponent, doneBytes: 0)) { [store, tell] in
            // Folders of other apps are open to this one only in between.
            #if canImport(Darwin)
            let isScoped = source.startAccessingSecurityScopedResource()
            defer {
                if isScoped {
                    source.stopAccessingSecurityScopedResource()
                }
            }
            #endif
            let name = source.lastPathComponent
            var done = 0
            _ = try store.importBundle(from: source) { bytes in
                done += bytes
                tell(.importing(name: name, doneBytes: done))
            }
        }
    }

    /// Downloads a bundle, going on with what is there of it; first asks whether it fits.
    public func fetch(_ address: String) {
        problem = nil
        do {
            guard let url = URL(string: address.trimmingCharacters(in: .whitespaces)) else {
                throw LesonnxError.input("'\(address)' is not an address")
            }
            let download = try BundleDownload(from: url, into: store)
            let tell = teller()
            begin(.fetching(name: download.name, doneBytes: 0, totalBytes: 0)) { [store, tell] in
                let needs = try await download.needs(contextTokens: Self.contextTokens)
                let fit = Fit(needs, on: .current(for: store.folder), isStored: false)
                if !fit.isFitting {
                    throw LesonnxError.input("\(download.name) does not fit. \(fit.summary)")
                }
                _ = try await download.run { progress in
                    tell(.fetching(name: download.name, doneBytes: progress.doneBytes, totalBytes: progress.totalBytes))
                }
            }
        } catch {
            problem = "\(error)"
        }
    }

    /// Stops what is under way. A download can go on later.
    public func cancel() { task?.cancel() }

    /// Deletes a bundle, or what is left of a download.
    public func remove(_ name: String) async {
        let store = store
        do {
            try await Task.detached { try store.remove(name) }.value
        } catch {
            problem = "\(error)"
        }
        await refresh()
    }

    /// Waits until nothing is under way.
    public func settle() async { await task?.value }

    private func begin(_ first: Work, _ body: @escaping @Sendable () async throws -> Void) {
        if work != nil {
            return
        }
        problem = nil
        work = first
        task = Task {
            let inner = Task.detached { try await body() }
            do {
                try await withTaskCancellationHandler {
                    try await inner.value
                } onCancel: {
                    inner.cancel()
                }
            } catch is CancellationError {
                // Whoever stopped it knows.
            } catch {
                problem = "\(error)"
            }
            work = nil
            await refresh()
        }
    }

    /// Takes news of the work under way from any thread.
    private func teller() -> @Sendable (Work) -> Void {
        { [weak self] now in
            Task { @MainActor in self?.report(now) }
        }
    }

    private func report(_ now: Work) {
        if work != nil {
            work = now
        }
    }
}
