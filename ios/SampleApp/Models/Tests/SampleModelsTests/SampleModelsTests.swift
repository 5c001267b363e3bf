import Foundation
import Lesonnx
import LesonnxScheduler
import LesonnxStore
import Testing

@testable import SampleModels

private let repository = URL(filePath: #filePath).appending(path: "../../../../../..").standardized
private let bundles: URL = {
    let named = ProcessInfo.processInfo.environment["LESONNX_MOBILE"].map { URL(filePath: $0) }
    return (named ?? repository.appending(path: "build/mobile")).appending(path: "bundles")
}()
private let mobileIsThere =
    FileManager.default.fileExists(atPath: bundles.path) || ProcessInfo.processInfo.environment["CI"] != nil

/// A folder of a test's own; gone when the test is done.
private final class Scratch {
    let folder = FileManager.default.temporaryDirectory.appending(path: "lesonnx-\(UUID().uuidString)")

    deinit { try? FileManager.default.removeItem(at: folder) }
}

/// The exporter's bundles under the app's own models: real tokens, real files. One after another, since the process has one pool
/// of threads and the tests look at memory.
@MainActor @Suite(.serialized, .enabled(if: mobileIsThere, "no build/mobile")) struct SampleModelsTests {
    private func opened(_ name: String, budget: Int? = nil, drafts: Bool = true) async throws -> Session {
        let session = Session()
        session.drafts = drafts
        await session.open(try ModelBundle(directory: bundles.appending(path: name)), expertBudgetBytes: budget)
        #expect(session.phase == .ready(name))
        return session
    }

    @Test func aBundleIsImportedListedAndRemoved() async throws {
        let scratch = Scratch()
        let shelf = try Shelf(folder: scratch.folder)
        await shelf.refresh()
        #expect(shelf.rows.isEmpty)
        shelf.importBundle(from: bundles.appending(path: "sample-int4"))
        #expect(shelf.work == .importing(name: "sample-int4", doneBytes: 0))
        await shelf.settle()
        #expect(shelf.work == nil && shelf.problem == nil && shelf.rows.map(\.name) == ["sample-int4"])
        let row = try #require(shelf.rows.first)
        #expect(row.summary.hasPrefix("qwen3_moe, 5.9") && row.fit?.isFitting == true && !row.chats)
        shelf.importBundle(from: bundles.appending(path: "sample-int4"))
        await shelf.settle()
        #expect(shelf.problem == "a bundle named sample-int4 is there already; remove it first")
        await shelf.remove("sample-int4")
        #expect(shelf.rows.isEmpty)
    }

    @Test func whatIsNoBundleOrNoAddress() async throws {
        let scratch = Scratch()
        let shelf = try Shelf(folder: scratch.folder)
        shelf.importBundle(from: repository.appending(path: "docs"))
        await shelf.settle()
        #expect(shelf.problem?.contains("not a bundle") == true && shelf.rows.isEmpty)
        shelf.fetch("sheep")
        #expect(shelf.problem == "'sheep' is not an address, expected https://…")
        shelf.fetch("http://127.0.0.1:9/none")
        await shelf.settle()
        #expect(shelf.problem?.hasPrefix("http://127.0.0.1:9/none/checksums.json: ") == true)
    }

    @Test func aCorruptBundleIsListedWithItsReason() async throws {
        let scratch = Scratch()
        let shelf = try Shelf(folder: scratch.folder)
        let bundle = scratch.folder.appending(path: "broken")
        try FileManager.default.createDirectory(at: bundle, withIntermediateDirectories: true)
        try Data("{}".utf8).write(to: bundle.appending(path: "manifest.json"))
        await shelf.refresh()
        #expect(shelf.rows.first?.fit == nil && shelf.rows.first?.summary.contains("producer: missing") == true)
    }

    /// A quantized bundle's text may round otherwise with drafts, a float one's does not.
    @Test(arguments: [("sample-int4", 1_179_648, false), ("sample-dspark-float", 7_077_888, true)])
    func aTextIsGoneOnWithAsInPython(bundle: String, budget: Int, drafts: Bool) async throws {
        let folder = bundles.appending(path: "../reference").standardized
        let name = try #require(
            FileManager.default.contentsOfDirectory(atPath: folder.path).first { $0.hasPrefix("\(bundle).") && $0.hasSuffix(".json") })
        let reference = try JSON(parsing: Data(contentsOf: folder.appending(path: name)))
        let record = try #require(reference["cases"]?.array?.first { $0["name"]?.string == "greedy-kernel" })
        let session = try await opened(bundle, budget: budget, drafts: drafts)
        let conversation = try #require(session.conversation)
        #expect(!conversation.chats && session.expertBudgetBytes == budget)
        conversation.maxNewTokens = try #require(record["token_ids"]?.array).count
        conversation.send(try #require(record["prompt"]?.string))
        #expect(conversation.isAnswering)
        await conversation.settle()
        #expect(conversation.lines.map(\.role) == [.user, .assistant] && conversation.problem == nil)
        #expect(conversation.lines.last?.text == record["text"]?.string)
        #expect(conversation.lines.last?.remark == "cut off at 40 tokens")
        let meter = session.meter
        #expect(meter.numTokens >= 40 && meter.samples.allSatisfy { (0...1).contains($0.hitShare) && $0.readBytes >= 0 })
        let memoryBytes = try #require(meter.last).memoryBytes
        #expect((meter.drafts != nil) == drafts && (meter.drafts?.numAccepted ?? 0) <= (meter.drafts?.numDrafted ?? 0))
        #expect(meter.readBytesPerToken > 0 && memoryBytes > 1 << 20)
        await session.close()
        #expect(session.phase == .empty && session.conversation == nil)
    }

    @Test func anAnswerIsStopped() async throws {
        let session = try await opened("sample-int4")
        let conversation = try #require(session.conversation)
        conversation.maxNewTokens = 1000
        conversation.send("In the beginning God created")
        while conversation.lines.last?.text.isEmpty == true && conversation.isAnswering {
            await Task.yield()
        }
        conversation.send("nothing happens while an answer is coming")
        conversation.stop()
        await conversation.settle()
        #expect(conversation.lines.count == 2 && conversation.lines.last?.remark == "stopped" && conversation.problem == nil)
        await conversation.reset()
        #expect(conversation.lines.isEmpty)
        conversation.maxNewTokens = 3
        conversation.send("And God said")
        await conversation.settle()
        #expect(conversation.lines.last?.text.isEmpty == false)
        await session.close()
    }

    @Test func aConversationOfTwoQuestions() async throws {
        // The sample has no chat template: one is written into a copy's manifest, of tokens that it knows.
        let scratch = Scratch()
        let bundle = scratch.folder.appending(path: "chat")
        try FileManager.default.createDirectory(at: scratch.folder, withIntermediateDirectories: true)
        try FileManager.default.copyItem(at: bundles.appending(path: "sample-int4"), to: bundle)
        let file = bundle.appending(path: "manifest.json")
        let format = """
            "chat_template": null, "chat_format": {"start": "", "messages": {"user": {"prefix": "<|im_start|>user\\n", "suffix":
            "<|im_end|>\\n"}, "assistant": {"prefix": "<|im_start|>assistant\\n", "suffix": "<|im_end|>\\n"}},
            "answer": "<|im_start|>assistant\\n"}
            """
        let old = try String(contentsOf: file, encoding: .utf8)
        let text = old.replacing(#/,\s*"chat_format": null/#, with: "").replacing("\"chat_template\": null", with: format)
        try Data(text.utf8).write(to: file)
        let session = Session()
        await session.open(try ModelBundle(directory: bundle), expertBudgetBytes: nil)
        let conversation = try #require(session.conversation)
        #expect(conversation.chats)
        conversation.maxNewTokens = 6
        conversation.send("In the beginning")
        await conversation.settle()
        let first = try #require(conversation.lines.last?.text)
        conversation.send("And God said")
        await conversation.settle()
        #expect(conversation.lines.map(\.role) == [.user, .assistant, .user, .assistant] && conversation.problem == nil)
        #expect(conversation.lines[1].text == first && !first.isEmpty && conversation.lines[3].text.isEmpty == false)
        await session.resetMeter()
        #expect(session.meter.samples.isEmpty)
        conversation.send("Let there be")
        await conversation.settle()
        let after = try #require(session.meter.samples.first)
        #expect(after.readBytes <= session.meter.telemetry.readBytes && session.meter.numTokens == session.meter.samples.count)
        await session.close()
    }

    @Test func aPictureGoesWithAQuestion() async throws {
        let name = "minicpmv4_7-float"
        let references = bundles.appending(path: "../reference").standardized
        let file = try #require(
            FileManager.default.contentsOfDirectory(atPath: references.path).sorted().last { $0.hasPrefix("\(name).") && $0.hasSuffix("case1.0.ppm") })
        let data = try Data(contentsOf: references.appending(path: file))
        // What the library answers to the same.
        let model = try await Model.load(bundles.appending(path: name))
        let message = ChatMessage(role: .user, content: "What is this?", images: [try Picture(encoded: data)])
        let expected = try await model.chat([message], GenerationOptions(maxNewTokens: 8)).text()
        await model.close()

        let scratch = Scratch()
        let app = try AppModel(folder: scratch.folder)
        app.shelf.importBundle(from: bundles.appending(path: name))
        await app.shelf.settle()
        await app.open(try #require(app.shelf.rows.first))
        let session = app.session
        let conversation = try #require(session.conversation)
        #expect(conversation.chats && conversation.pictureObstacle == nil && conversation.introduction.isEmpty)
        // Experts give way to eyes only within a memory budget.
        #expect(try #require(session.memoryBudgetBytes) > 1 << 28 && session.expertBudgetBytes == session.bundle?.expertBytes)
        conversation.maxNewTokens = 8
        await conversation.attach { data }
        let first = try #require(conversation.attachments.first)
        #expect(first.picture.width == 280 && first.picture.height == 170 && !conversation.isDecoding)
        #expect(first.thumbnail.width == 192 && first.thumbnail.height == 116)
        #expect(Array(first.thumbnail.rgb.prefix(3)) == Array(first.picture.rgb.prefix(3)))
        for (bad, why) in [
            (Data("sheep".utf8), "the picture: not a"), (nil, "the picture cannot be read"),
            (Data("P6 900 1 255\n".utf8) + Data(count: 2700), "a picture of 900 x 1 pixels is too narrow"),
        ] as [(Data?, String)] {
            await conversation.attach { bad }
            #expect(conversation.problem?.hasPrefix(why) == true && conversation.attachments == [first])
        }
        await conversation.attach { throw CocoaError(.fileReadUnknown) }
        #expect(conversation.problem != nil && conversation.attachments == [first])
        await conversation.attach { data }
        #expect(conversation.problem == nil && conversation.attachments.map(\.id) == [0, 1])
        conversation.detach(conversation.attachments[1])
        conversation.send("What is this?")
        #expect(conversation.attachments.isEmpty && conversation.lines[0].attachments == [first])
        await conversation.settle()
        #expect(conversation.problem == nil && conversation.lines.last?.text == expected && !expected.isEmpty)
        // The next question is about the same picture.
        conversation.send("And where?")
        await conversation.settle()
        #expect(conversation.problem == nil && conversation.lines.count == 4 && conversation.lines[2].attachments.isEmpty)
        // A question that cannot be served gives its pictures back.
        await conversation.attach { data }
        let third = conversation.attachments
        conversation.maxNewTokens = 100_000
        conversation.send("And when?")
        await conversation.settle()
        #expect(conversation.problem?.contains("context") == true && conversation.attachments == third)
        await conversation.reset()
        #expect(conversation.attachments.isEmpty)
        // One that is too small bounds the experts alone.
        let bundle = try #require(session.bundle)
        await session.open(bundle, expertBudgetBytes: bundle.leastBudgetBytes, memoryBudgetBytes: 1 << 20)
        #expect(session.memoryBudgetBytes == nil && session.expertBudgetBytes == bundle.leastBudgetBytes)
        await session.close()
    }

    @Test func aBundleWithoutEyesSaysSo() async throws {
        let session = try await opened("sample-int4")
        let conversation = try #require(session.conversation)
        let obstacle = "This bundle has no eyes: it takes no pictures."
        #expect(conversation.pictureObstacle == obstacle && conversation.introduction.hasSuffix(obstacle))
        await conversation.attach {
            Issue.record("a picture was loaded")
            return nil
        }
        #expect(conversation.problem == obstacle && conversation.attachments.isEmpty)
        await session.close()
    }

    @Test func whatCannotBeServedIsSaid() async throws {
        let session = try await opened("sample-int4")
        let conversation = try #require(session.conversation)
        conversation.send(String(repeating: "word ", count: 4000))
        await conversation.settle()
        #expect(conversation.problem?.contains("context") == true && conversation.lines.count == 1)
        await session.close()
        await session.open(try ModelBundle(directory: bundles.appending(path: "sample-int4")), expertBudgetBytes: 10)
        guard case .failed(let why) = session.phase else {
            Issue.record("\(session.phase)")
            return
        }
        #expect(why.contains("at least 98304"))
    }

    @Test func theLadder() async throws {
        let bundle = try ModelBundle(directory: bundles.appending(path: "sample-int4"))
        let benchmark = Benchmark()
        benchmark.numTokens = 8
        benchmark.numWarmupTokens = 4
        benchmark.run(bundle, expertBudgetBytes: bundle.expertBytes / 2)
        #expect(benchmark.isRunning && benchmark.rows.count == 6)
        await benchmark.settle()
        #expect(!benchmark.isRunning)
        for row in benchmark.rows.prefix(5) {
            let result = try #require(row.result)
            #expect(result.tokensPerS > 0 && (result.isSameText || result.drafts != nil), "\(row.title)")
        }
        #expect(benchmark.rows[0].result?.hitShare == 0 && benchmark.rows[1].result!.hitShare > 0)
        #expect(benchmark.rows.map { $0.result?.drafts != nil } == [false, false, false, false, true, false])
        #expect(benchmark.rows[5].problem?.contains("keeps all experts") == true, "half of the experts cannot be all of them")
        #expect(benchmark.speedup != nil)
    }

    @Test func fromTheShelfToATextAndABenchmark() async throws {
        let scratch = Scratch()
        let app = try AppModel(folder: scratch.folder)
        app.shelf.importBundle(from: bundles.appending(path: "qwen2_moe-int4"))
        await app.shelf.settle()
        await app.open(try #require(app.shelf.rows.first))
        #expect(app.session.phase == .ready("qwen2_moe-int4") && app.session.expertBudgetBytes == app.session.bundle?.expertBytes)
        app.benchmark.numTokens = 4
        app.benchmark.numWarmupTokens = 2
        await app.runBenchmark()
        #expect(app.benchmark.rows.filter { $0.result?.isSameText == true && $0.result?.drafts == nil }.count == 4)
        #expect(app.session.phase == .ready("qwen2_moe-int4"), "the bundle is loaded again")
        await app.remove("qwen2_moe-int4")
        #expect(app.session.phase == .empty && app.shelf.rows.isEmpty)
    }

    @Test func theLadderIsBrokenOff() async throws {
        let bundle = try ModelBundle(directory: bundles.appending(path: "sample-int4"))
        let benchmark = Benchmark()
        benchmark.numTokens = 500
        benchmark.run(bundle, expertBudgetBytes: bundle.expertBytes)
        benchmark.cancel()
        await benchmark.settle()
        #expect(!benchmark.isRunning && benchmark.rows.last?.result == nil)
    }
}

@MainActor @Suite struct MeterTests {
    @Test func speedSharesAndBytes() {
        let meter = Meter()
        var telemetry = Telemetry()
        for token in 1...300 {
            telemetry.hits += 6
            telemetry.misses += 2
            telemetry.readBytes += 100
            meter.add(telemetry, atSeconds: Double(token) * 0.5, memoryBytes: token)
        }
        #expect(meter.last?.tokensPerS == 2 && meter.last?.hitShare == 0.75 && meter.last?.readBytes == 100)
        #expect(meter.samples.count == Meter.samplesLimit && meter.numTokens == 300 && meter.readBytesPerToken == 100)
        meter.pause()
        meter.add(telemetry, atSeconds: 1000, memoryBytes: 0)
        #expect(meter.last?.tokensPerS == 0, "the time between two generations does not count")
        meter.reset()
        #expect(meter.samples.isEmpty && meter.numTokens == 0)
    }
}
