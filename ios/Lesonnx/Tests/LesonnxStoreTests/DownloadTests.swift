import Foundation
import LesonnxScheduler
import Testing

@testable import LesonnxStore

/// What a download's progress said.
private final class Heard: @unchecked Sendable {
    private let lock = NSLock()
    private var all: [BundleDownload.Progress] = []

    func add(_ progress: BundleDownload.Progress) { lock.withLock { all.append(progress) } }
    var first: BundleDownload.Progress? { lock.withLock { all.first } }
    var last: BundleDownload.Progress? { lock.withLock { all.last } }
    var isPlausible: Bool { lock.withLock { all.allSatisfy { (0...$0.totalBytes).contains($0.doneBytes) } } }
}

@Suite(.enabled(if: mobileIsThere, "no build/mobile")) struct DownloadTests {
    private let scratch: Scratch
    private let store: BundleStore
    private let source: URL
    private let server: TinyServer
    private let download: BundleDownload

    init() throws {
        scratch = try Scratch()
        store = try scratch.store()
        source = try scratch.copy()
        server = try TinyServer(source.deletingLastPathComponent())
        download = try BundleDownload(from: server.url.appending(path: "small"), into: store)
    }

    @Test func fetchesAWholeBundle() async throws {
        defer { server.stop() }
        let heard = Heard()
        let bundle = try await download.run { heard.add($0) }
        #expect(try bundle.verify() == Checksums(of: source).entries.count)
        #expect(try store.names() == ["small"] && store.partialNames().isEmpty)
        let total = try Checksums(of: source).totalBytes
        #expect(heard.first == .init(doneBytes: 0, totalBytes: total) && heard.last == .init(doneBytes: total, totalBytes: total))
        let again = await errorText { _ = try await download.run() }
        #expect(again == "a bundle named small is there already; remove it first")
    }

    @Test func goesOnWhereItWasBrokenOff() async throws {
        defer { server.stop() }
        let size = try sizeBytes(of: source.appending(path: "dense/dense.bin"))
        server.fail("small/dense/dense.bin", .breaksOff(size / 2))
        let first = await errorText { _ = try await download.run() }
        #expect(first.contains("dense.bin"))
        #expect(try store.partialNames() == ["small"] && store.names().isEmpty)
        let before = server.requests.count
        let heard = Heard()
        let bundle = try await download.run { heard.add($0) }
        #expect(try bundle.verify() > 0)
        #expect(try #require(heard.first).doneBytes >= size / 2 && heard.isPlausible)
        let resumed = server.requests.dropFirst(before)
        #expect(resumed.contains("small/dense/dense.bin \(size / 2)-"))
        #expect(!resumed.contains { $0.hasPrefix("small/dense/embed.onnx") && server.requests.prefix(before).contains($0) })
    }

    @Test func startsAnewWhereTheServerDoesNotResume() async throws {
        defer { server.stop() }
        server.fail("small/dense/dense.bin", .breaksOff(1000))
        server.ignoreRanges()
        _ = await errorText { _ = try await download.run() }
        let heard = Heard()
        #expect(try await download.run { heard.add($0) }.verify() > 0)
        let total = try Checksums(of: source).totalBytes
        #expect(heard.last == .init(doneBytes: total, totalBytes: total) && heard.isPlausible)
    }

    @Test func whatCameWrongIsFetchedAgain() async throws {
        defer { server.stop() }
        server.fail("small/experts/layer_000/experts.pack", .corrupts)
        let found = await errorText { _ = try await download.run() }
        #expect(found.contains("experts.pack") && found.contains("SHA-256 differs"))
        #expect(try store.names().isEmpty)
        #expect(try await download.run().verify() > 0)
    }

    @Test func aBundleThatChangedMeanwhile() async throws {
        defer { server.stop() }
        server.fail("small/experts/stage_0.onnx", .answers(503))
        _ = await errorText { _ = try await download.run() }
        // The server's bundle is another one now: of the same length, so that only its checksum tells.
        let file = source.appending(path: "dense/dense.bin")
        var bytes = try Data(contentsOf: file)
        bytes[0] ^= 1
        try bytes.write(to: file)
        let checksums = source.appending(path: Checksums.fileName)
        let old = try #require(Checksums(of: source).entries.first { $0.path == "dense/dense.bin" }).sha256
        let text = try String(contentsOf: checksums, encoding: .utf8).replacing(old, with: sha256(of: file))
        try Data(text.utf8).write(to: checksums)
        #expect(try await download.run().verify() > 0)
    }

    @Test func whatServersSay() async throws {
        defer { server.stop() }
        server.fail("small/checksums.json", .answers(500))
        #expect(await errorText { _ = try await download.run() }.hasSuffix("small/checksums.json: the server answered 500"))
        let nowhere = try BundleDownload(from: server.url.appending(path: "other"), into: store)
        #expect(await errorText { _ = try await nowhere.run() }.hasSuffix("other/checksums.json: the server answered 404"))
        #expect(try store.names().isEmpty)
    }

    @Test func noServer() async throws {
        server.stop()
        #expect(await errorText { _ = try await download.run() }.contains("checksums.json: "))
    }

    @Test func needsBeforeAnythingElse() async throws {
        defer { server.stop() }
        let needs = try await download.needs(contextTokens: 512)
        let checksums = try Checksums(of: source)
        let manifest = try ModelBundle(directory: source).manifest
        #expect(needs == BundleNeeds(manifest, checksums, contextTokens: 512))
        #expect(server.requests.sorted() == ["small/checksums.json", "small/manifest.json"])
    }

    @Test func cancelledAndGoneOnWith() async throws {
        defer { server.stop() }
        let task = Task { [download] in
            try await download.run { progress in
                if progress.doneBytes > 10_000 {
                    withUnsafeCurrentTask { $0?.cancel() }
                }
            }
        }
        task.cancel()
        let result = await task.result
        #expect(throws: CancellationError.self) { try result.get() }
        #expect(try store.names().isEmpty)
        #expect(try await download.run().verify() > 0)
    }

    @Test(arguments: ["ftp://a/b", "small", "file:///tmp/x", "http:///x"]) func addressesThatAreNone(_ text: String) throws {
        server.stop()
        let url = try #require(URL(string: text))
        #expect(throws: LesonnxError.self) { try BundleDownload(from: url, into: store) }
    }
}
