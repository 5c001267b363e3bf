import Foundation
import LesonnxScheduler

/// The bundles of an app: one folder, each bundle a folder in it. What is not whole yet is called `.NAME.partial`.
///
/// A value; two at once must not import or fetch the same name. Nothing it does touches a bundle that is whole, but `remove`.
public struct BundleStore: Sendable {
    public let folder: URL

    /// Makes the folder where it is missing, and keeps it out of the device's backups: bundles are large and can be had again.
    public init(folder: URL) throws {
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        #if canImport(Darwin)
        var excluded = folder
        var values = URLResourceValues()
        values.isExcludedFromBackup = true
        try excluded.setResourceValues(values)
        #endif
        self.folder = folder
    }

    /// Names of the bundles that are whole, ascending.
    public func names() throws -> [String] {
        try FileManager.default.contentsOfDirectory(atPath: folder.path(percentEncoded: false))
            .filter { !$0.hasPrefix(".") && exists(folder.appending(path: "\($0)/manifest.json")) }.sorted()
    }

    /// Names of bundles whose download was broken off, ascending.
    public func partialNames() throws -> [String] {
        try FileManager.default.contentsOfDirectory(atPath: folder.path(percentEncoded: false))
            .filter { $0.hasPrefix(".") && $0.hasSuffix(".partial") }.map { String($0.dropFirst().dropLast(8)) }.sorted()
    }

    public func url(of name: String) -> URL { folder.appending(path: name) }

    public func bundle(named name: String) throws(LesonnxError) -> ModelBundle {
        try ModelBundle(directory: url(of: name))
    }

    /// Deletes a bundle, and what is left of one that was broken off.
    public func remove(_ name: String) throws {
        for url in [url(of: name), partialURL(of: name)] where exists(url) {
            try FileManager.default.removeItem(at: url)
        }
    }

    /// Copies a bundle from a folder outside (a file picker's, say), checks every file, and gives it its name.
    ///
    /// `progress` hears of bytes as they are checked. Throws `bundle` for a source that is none or corrupt, `input` for a name that
    /// is taken, CancellationError when its task is cancelled; then nothing is left behind.
    public func importBundle(from source: URL, progress: (Int) -> Void = { _ in }) throws -> String {
        let name = try freeName(source.lastPathComponent)
        let original = try ModelBundle(directory: source)
        let checksums = try Checksums(of: source)
        let partial = partialURL(of: name)
        if exists(partial) {
            try FileManager.default.removeItem(at: partial)
        }
        do {
            for path in checksums.entries.map(\.path) + [Checksums.fileName] {
                try Task.checkCancellation()
                let target = partial.appending(path: path)
                try FileManager.default.createDirectory(
                    at: target.deletingLastPathComponent(), withIntermediateDirectories: true)
                // Where both lie on one volume of Apple's file system, copies share their blocks and cost nothing.
                try FileManager.default.copyItem(at: original.file(path), to: target)
            }
            try ModelBundle(directory: partial).verify(progress: progress)
            try finish(name)
        } catch {
            try? FileManager.default.removeItem(at: partial)
            throw error
        }
        return name
    }

    // MARK: for the download

    func partialURL(of name: String) -> URL { folder.appending(path: ".\(name).partial") }

    /// The name, where a new bundle may have it; throws `input` where it is taken, or is no name.
    func freeName(_ name: String) throws(LesonnxError) -> String {
        if name.hasPrefix(".") || name.utf8.contains(UInt8(ascii: "/")) || !isBundlePath(name) {
            throw .input("'\(name)' cannot be the name of a bundle")
        }
        if exists(url(of: name)) {
            throw .input("a bundle named \(name) is there already; remove it first")
        }
        return name
    }

    /// Gives what is whole now its name.
    func finish(_ name: String) throws {
        try FileManager.default.moveItem(at: partialURL(of: name), to: url(of: name))
    }
}
