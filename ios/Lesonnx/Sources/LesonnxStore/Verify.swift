import Foundation
import LesonnxScheduler

private let readBytes = 1 << 20

/// The SHA-256 of a file, read in pieces; `progress` hears of each piece's bytes. Throws CancellationError when its task is
/// cancelled.
public func sha256(of file: URL, progress: (Int) -> Void = { _ in }) throws -> String {
    guard let handle = try? FileHandle(forReadingFrom: file) else {
        throw LesonnxError.bundle("\(file.path(percentEncoded: false)): not readable")
    }
    defer { try? handle.close() }
    var digest = Sha256()
    while let block = try handle.read(upToCount: readBytes), !block.isEmpty {
        try Task.checkCancellation()
        block.withUnsafeBytes { digest.update($0) }
        progress(block.count)
    }
    return digest.finish()
}

extension ModelBundle {
    /// Compare every file with `checksums.json`; gives their number. Throws `bundle`, naming the first that differs.
    @discardableResult
    public func verify(progress: (Int) -> Void = { _ in }) throws -> Int {
        let checksums = try Checksums(of: directory)
        let known = Set(checksums.entries.map(\.path) + [Checksums.fileName])
        if let stranger = try filePaths(in: directory).sorted().first(where: { !known.contains($0) }) {
            let path = directory.appending(path: stranger).path(percentEncoded: false)
            throw LesonnxError.bundle("\(path): is not named in checksums.json")
        }
        for entry in checksums.entries {
            try check(file(entry.path), against: entry, progress: progress)
        }
        return checksums.entries.count
    }
}

/// Throws `bundle` where a file has another length or other bytes than `checksums.json` says.
func check(_ file: URL, against entry: Checksums.Entry, progress: (Int) -> Void = { _ in }) throws {
    let path = file.path(percentEncoded: false)
    let size = try sizeBytes(of: file)
    if size != entry.sizeBytes {
        throw LesonnxError.bundle("\(path): has \(size) bytes, checksums.json says \(entry.sizeBytes)")
    }
    if try sha256(of: file, progress: progress) != entry.sha256 {
        throw LesonnxError.bundle("\(path): SHA-256 differs from checksums.json; the file is corrupt")
    }
}

/// Every file below a folder by its relative path; a link counts as a file, and is not walked into.
func filePaths(in folder: URL, below prefix: String = "") throws -> [String] {
    var paths: [String] = []
    let path = folder.appending(path: prefix).path(percentEncoded: false)
    for name in try FileManager.default.contentsOfDirectory(atPath: path) {
        let relative = prefix.isEmpty ? name : "\(prefix)/\(name)"
        let full = folder.appending(path: relative).path(percentEncoded: false)
        let type = try FileManager.default.attributesOfItem(atPath: full)[.type] as? FileAttributeType
        if type == .typeDirectory {
            paths += try filePaths(in: folder, below: relative)
        } else {
            paths.append(relative)
        }
    }
    return paths
}

func exists(_ url: URL) -> Bool {
    FileManager.default.fileExists(atPath: url.path(percentEncoded: false))
}
