import Foundation
import LesonnxScheduler

/// `checksums.json`: size and SHA-256 of every other file of a bundle. Immutable.
public struct Checksums: Equatable, Sendable {
    public static let fileName = "checksums.json"

    public struct Entry: Equatable, Sendable {
        public let path: String
        public let sizeBytes: Int
        public let sha256: String
    }

    /// By path, ascending.
    public let entries: [Entry]

    /// All files together, without `checksums.json` itself.
    public var totalBytes: Int { entries.reduce(0) { $0 + $1.sizeBytes } }

    /// The files of the dense parts.
    public var denseBytes: Int {
        entries.reduce(0) { $0 + ($1.path.hasPrefix("dense/") ? $1.sizeBytes : 0) }
    }

    /// The size of a file; 0 where none has that path.
    public func sizeBytes(of path: String) -> Int { entries.first { $0.path == path }?.sizeBytes ?? 0 }

    /// Throws `bundle`, naming `source`, for anything that is not as the format says.
    public init(parsing text: some Collection<UInt8>, source: String = Self.fileName) throws(LesonnxError) {
        func wrong(_ what: String) -> LesonnxError { .bundle("\(source): \(what)") }
        let document: JSON
        do {
            document = try JSON(parsing: text)
        } catch {
            throw .bundle("\(source): \(error)")
        }
        guard let keys = document.object?.map(\.key), keys.sorted() == ["algorithm", "files"],
            document["algorithm"]?.string == "sha256"
        else { throw wrong("expected an object of algorithm, which is sha256, and files") }
        guard let files = document["files"]?.object else { throw wrong("files: expected an object") }
        if !Array(text.suffix(2)).elementsEqual("}\n".utf8) {
            throw wrong("does not end in a line's end; the file is cut off")
        }
        var entries: [Entry] = []
        for file in files {
            guard file.value.object?.count == 2, let size = file.value["size_bytes"]?.int, let digest = file.value["sha256"]?.string
            else { throw wrong("\(file.key): expected size_bytes and sha256") }
            guard isBundlePath(file.key) else { throw wrong("path '\(file.key)' must be relative and stay inside the bundle") }
            let isDigest = digest.utf8.count == 64 && digest.utf8.allSatisfy { "0123456789abcdef".utf8.contains($0) }
            guard (0...(1 << 48)).contains(size), isDigest else {
                throw wrong("\(file.key): expected a size and 64 hexadecimal letters")
            }
            entries.append(Entry(path: file.key, sizeBytes: size, sha256: digest))
        }
        self.entries = entries.sorted { $0.path < $1.path }
    }

    /// Those of a bundle's folder.
    public init(of folder: URL) throws(LesonnxError) {
        let file = folder.appending(path: Self.fileName)
        guard let text = try? Data(contentsOf: file) else {
            throw .bundle("\(file.path(percentEncoded: false)): missing from the bundle")
        }
        try self.init(parsing: text, source: file.path(percentEncoded: false))
    }
}
