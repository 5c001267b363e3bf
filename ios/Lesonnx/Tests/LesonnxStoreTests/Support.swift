import Foundation
import LesonnxScheduler
import Testing

@testable import LesonnxStore

/// The repository, seen from this file.
let repository = URL(filePath: #filePath).appending(path: "../../../../..").standardized

/// A bundle that the exporter wrote, by name; nil where nobody made the mobile fixtures.
func mobileBundle(_ name: String) -> URL? {
    let named = ProcessInfo.processInfo.environment["LESONNX_MOBILE"].map { URL(filePath: $0) }
    let bundle = (named ?? repository.appending(path: "build/mobile")).appending(path: "bundles/\(name)")
    return exists(bundle) ? bundle : nil
}

let sampleBundle = mobileBundle("qwen2_moe-int4")
let mobileIsThere = sampleBundle != nil || ProcessInfo.processInfo.environment["CI"] != nil

/// A folder of a test's own; gone when the test is done.
final class Scratch {
    let folder = FileManager.default.temporaryDirectory.appending(path: "lesonnx-\(UUID().uuidString)")

    init() throws {
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
    }

    deinit {
        try? FileManager.default.removeItem(at: folder)
    }

    func store() throws -> BundleStore { try BundleStore(folder: folder.appending(path: "store")) }

    /// A copy of the exporter's bundle, to be spoilt.
    func copy() throws -> URL {
        let target = folder.appending(path: "source/small")
        try FileManager.default.createDirectory(at: target.deletingLastPathComponent(), withIntermediateDirectories: true)
        try FileManager.default.copyItem(at: try #require(sampleBundle), to: target)
        return target
    }
}

/// The text of the error that `body` throws, which is one line.
func errorText(_ body: () async throws -> Void) async -> String {
    do {
        try await body()
        Issue.record("expected an error")
        return ""
    } catch {
        #expect(!"\(error)".contains("\n"))
        return "\(error)"
    }
}
