import Foundation
import LesonnxScheduler

#if canImport(FoundationNetworking)
import FoundationNetworking
#endif

/// Fetches a bundle from where its files lie under one address, file by file, into a store.
///
/// A file has its name in `.NAME.partial` once its checksum is right; until then it is called `PATH.part`. So a download that was
/// broken off, by whatever, goes on where it was: call `run` again. A value; one run at a time for a name.
public struct BundleDownload: Sendable {
    /// No text that is read at once is longer.
    private static let textLimitBytes = 64 << 20

    public struct Progress: Equatable, Sendable {
        public var doneBytes: Int
        public var totalBytes: Int
    }

    public let address: URL
    public let name: String
    private let store: BundleStore
    private let configuration: @Sendable () -> URLSessionConfiguration

    /// `address` is the folder that `manifest.json` lies in, by http or https; the bundle gets its last piece as its name, or
    /// `name`. Throws `input` for an address that is none.
    public init(
        from address: URL, into store: BundleStore, name: String? = nil,
        configuration: @escaping @Sendable () -> URLSessionConfiguration = { .default }
    ) throws(LesonnxError) {
        guard ["http", "https"].contains(address.scheme?.lowercased()), address.host()?.isEmpty == false else {
            throw .input("'\(address.absoluteString)' is not an address, expected https://…")
        }
        self.address = address
        self.name = name ?? address.lastPathComponent
        self.store = store
        self.configuration = configuration
    }

    /// What the bundle needs, from its two small files, before anything else is fetched.
    public func needs(contextTokens: Int) async throws -> BundleNeeds {
        let checksums = try Checksums(parsing: await text(Checksums.fileName))
        let manifest = try BundleManifest(parsing: await text("manifest.json"))
        return BundleNeeds(manifest, checksums, contextTokens: contextTokens)
    }

    /// Fetches what is missing, and gives the bundle its name when all is there. `progress` comes from any thread.
    ///
    /// Throws `input` for a name that is taken, `bundle` for what the server has and is no bundle, `failure` for what goes wrong on
    /// the way, CancellationError when its task is cancelled. What was fetched stays for the next `run`, but a file that turned out
    /// wrong.
    public func run(progress: @escaping @Sendable (Progress) -> Void = { _ in }) async throws -> ModelBundle {
        let partial = store.partialURL(of: try store.freeName(name))
        try FileManager.default.createDirectory(at: partial, withIntermediateDirectories: true)
        let text = try await text(Checksums.fileName)
        let checksums = try Checksums(parsing: text)
        try removeStale(in: partial, checksums)
        try text.write(to: partial.appending(path: Checksums.fileName))
        let missing = checksums.entries.filter { entry in
            let file = partial.appending(path: entry.path)
            return !exists(file) || (try? sizeBytes(of: file)) != entry.sizeBytes
        }
        let lacking = missing.reduce(0) { $0 + $1.sizeBytes - haveBytes(partURL(partial, $1)) }
        let total = checksums.totalBytes
        let counter = Counter(Progress(doneBytes: total - lacking, totalBytes: total), progress)
        for entry in missing {
            try Task.checkCancellation()
            try await fetch(entry, into: partial, counter)
        }
        _ = try ModelBundle(directory: partial)
        try store.finish(name)
        return try store.bundle(named: name)
    }

    private func fetch(_ entry: Checksums.Entry, into partial: URL, _ counter: Counter) async throws {
        let file = partial.appending(path: entry.path)
        let part = partURL(partial, entry)
        try FileManager.default.createDirectory(at: file.deletingLastPathComponent(), withIntermediateDirectories: true)
        if !exists(part) || haveBytes(part) < entry.sizeBytes {
            try await HTTPFile.fetch(
                address.appending(path: entry.path), appendingTo: part, configuration: configuration(),
                progress: { counter.add($0) })
        }
        do {
            try check(part, against: entry)
        } catch let error as LesonnxError {
            // Nothing of it can be trusted: the next run fetches it anew.
            counter.add(-haveBytes(part))
            try? FileManager.default.removeItem(at: part)
            throw error
        }
        if exists(file) {
            try FileManager.default.removeItem(at: file)
        }
        try FileManager.default.moveItem(at: part, to: file)
    }

    /// Files that belong to another state of the bundle, which the server had when this download began.
    private func removeStale(in partial: URL, _ checksums: Checksums) throws {
        let old = (try? Checksums(of: partial))?.entries ?? []
        let same = Set(old.map { "\($0.path) \($0.sha256)" })
        let fresh = checksums.entries.filter { same.contains("\($0.path) \($0.sha256)") }
        let kept = Set(fresh.flatMap { [$0.path, "\($0.path).part"] })
        for path in try filePaths(in: partial) where !kept.contains(path) {
            try FileManager.default.removeItem(at: partial.appending(path: path))
        }
    }

    private func text(_ path: String) async throws -> Data {
        let file = FileManager.default.temporaryDirectory.appending(path: "lesonnx-\(UUID().uuidString)")
        defer { try? FileManager.default.removeItem(at: file) }
        try await HTTPFile.fetch(
            address.appending(path: path), appendingTo: file, configuration: configuration(), progress: { _ in })
        let size = try sizeBytes(of: file)
        if size > Self.textLimitBytes {
            throw LesonnxError.bundle("\(path): has \(size) bytes, expected at most \(Self.textLimitBytes)")
        }
        return try Data(contentsOf: file)
    }
}

private func partURL(_ partial: URL, _ entry: Checksums.Entry) -> URL {
    partial.appending(path: entry.path + ".part")
}

private func haveBytes(_ file: URL) -> Int {
    exists(file) ? (try? sizeBytes(of: file)) ?? 0 : 0
}

/// Adds bytes up, from the session's threads; the lock guards the sum.
private final class Counter: @unchecked Sendable {
    private let lock = NSLock()
    private var sum: BundleDownload.Progress
    private let report: @Sendable (BundleDownload.Progress) -> Void

    init(_ start: BundleDownload.Progress, _ report: @escaping @Sendable (BundleDownload.Progress) -> Void) {
        sum = start
        self.report = report
        report(start)
    }

    func add(_ bytes: Int) {
        let now = lock.withLock {
            sum.doneBytes += bytes
            return sum
        }
        report(now)
    }
}
