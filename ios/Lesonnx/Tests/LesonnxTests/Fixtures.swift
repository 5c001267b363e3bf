import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

/// Bundles with what the Python runner gave for them, made by `tools/make_mobile_fixtures.py`; `LESONNX_MOBILE` says where.
enum Fixtures {
    static let folder: URL = {
        if let path = ProcessInfo.processInfo.environment["LESONNX_MOBILE"] {
            return URL(filePath: path)
        }
        return URL(filePath: #filePath).appending(path: "../../../../../build/mobile").standardized
    }()

    static let isThere = FileManager.default.fileExists(atPath: folder.appending(path: "bundles").path)

    /// Where they are missing the tests are left out, by name; in CI they run, and fail.
    static let canRun = isThere || ProcessInfo.processInfo.environment["CI"] != nil

    /// Of every kind: attention in floats and in 8 bits, latent attention, sinks and windows, dense MLPs beside experts, early
    /// routers, recurrences and convolutions, experts of several precisions, three rows of positions.
    static let names = [
        "sample-int4", "sample-int4-kv8", "qwen3_moe-float", "qwen2_moe-float", "qwen2_moe-int4", "qwen3_next-float",
        "qwen3_next-portable-float", "lfm2_moe-float", "deepseek_v3-float", "gpt_oss-float", "gemma4_text-float",
        "smallthinker-float", "sample-dspark-float", "sample-dspark-int4", "qwen2_moe-mixed", "qwen3_moe-twins-ios-float",
        "qwen2_moe-twins-android-int4", "minicpmv4_7-float",
    ]

    /// Those that the ONNX Runtime in use is new enough for. A bundle that is missing stays among them, so that its tests fail.
    static let runnable = names.filter(isRunnable)

    static let twins = ["qwen3_moe-twins-ios-float", "qwen2_moe-twins-android-int4"].filter(isRunnable)

    static let recurrent = ["qwen3_next-float", "qwen3_next-portable-float", "lfm2_moe-float"].filter(isRunnable)

    static func isRunnable(_ name: String) -> Bool {
        guard let bundle = try? bundle(name), let library = try? OrtLibrary.shared() else { return true }
        return isVersion(library.version, atLeast: bundle.manifest.onnxruntimeAtLeast)
    }

    static func bundle(_ name: String) throws -> ModelBundle {
        try ModelBundle(directory: folder.appending(path: "bundles/\(name)"))
    }

    /// The reference of the ONNX Runtime in use, and whether bits can be compared: without one, tokens are, with any other's.
    static func reference(_ bundle: String) throws -> (reference: Reference, hasBits: Bool) {
        let version = try OrtLibrary.shared().version
        let own = folder.appending(path: "reference/\(bundle).\(version).json")
        if FileManager.default.fileExists(atPath: own.path) {
            return (try Reference(own), true)
        }
        let any = try FileManager.default.contentsOfDirectory(atPath: folder.appending(path: "reference").path)
            .sorted().last { $0.hasPrefix("\(bundle).") && $0.hasSuffix(".json") }
        return (try Reference(folder.appending(path: "reference/\(try #require(any))")), false)
    }

    /// A copy of a bundle that a test may break.
    static func copy(_ name: String) throws -> URL {
        let target = FileManager.default.temporaryDirectory.appending(path: "lesonnx-\(UUID().uuidString)")
        try FileManager.default.copyItem(at: folder.appending(path: "bundles/\(name)"), to: target)
        return target
    }
}

/// One file of `reference/`.
struct Reference {
    struct Case: Sendable {
        let name: String
        let engine: EngineChoice
        let prompt: String?
        let promptIds: [Int]
        /// Of a rewind: the tokens of the step after the prompt, of which the first `keptTokens` stay.
        let stepIds: [Int]
        let keptTokens: Int
        let tokenIds: [Int]
        let sampling: SamplingOptions
        let text: String?
        let logits: String
        let vocabSize: Int
    }

    /// A greedy generation by drafts of `draftTokens`; before each pass a whole block was also drawn by `sampling`.
    struct Drafts: Sendable {
        struct Pass: Sendable {
            let drafted: [Int]
            let confidence: [Int]
            let accepted: Int
        }

        let promptIds: [Int]
        let draftTokens: Int
        let passes: [Pass]
        let tokenIds: [Int]
        let sampling: SamplingOptions
        let sampled: [[Int]]
    }

    /// A greedy generation from a prompt with pictures, and what Python had on the way to it.
    struct Pictured: Sendable {
        /// A placeholder a picture.
        let prompt: String
        /// PPM files.
        let images: [String]
        /// Of each picture: height, width, rows and columns of each view.
        let views: [[[Int]]]
        let promptIds: [Int]
        let positionIds: [[Int]]
        /// Files: crop after crop, all pictures' features, and row i: what token i was chosen from.
        let pixelValues: String
        let features: String
        let logits: String
        let tokenIds: [Int]
        let name: String
    }

    let numThreads: Int
    let prefillChunkTokens: Int
    let cases: [Case]
    /// Generations that go on from a step that was taken back in part; their first logits are the step's.
    let rewinds: [Case]
    /// Generations by the bundle's twins on the CPU provider.
    let twins: [Case]
    /// What the bundle's own drafter drafts, pass by pass.
    let drafter: Drafts?
    /// Prompts with pictures; none where the bundle has no eyes.
    let vision: [Pictured]
    let tokenizer: [(text: String, ids: [Int])]
    private let folder: URL

    init(_ file: URL) throws {
        folder = file.deletingLastPathComponent()
        let document = try JSON(parsing: Data(contentsOf: file))
        numThreads = try #require(document["num_threads"]?.int)
        prefillChunkTokens = try #require(document["prefill_chunk_tokens"]?.int)
        tokenizer = (document["tokenizer"]?.array ?? []).map { entry in
            (entry["text"]?.string ?? "", (entry["ids"]?.array ?? []).compactMap(\.int))
        }
        cases = try (document["cases"]?.array ?? []).map(Self.read)
        rewinds = try (document["rewinds"]?.array ?? []).map(Self.read)
        twins = try (document["twins"]?.array ?? []).map(Self.read)
        vision = try (document["vision"]?.array ?? []).map(Self.readPictured)
        drafter = try document["drafter"].map(Self.readDrafts)
        try #require(!cases.isEmpty && !rewinds.isEmpty)
    }

    private static func readDrafts(_ entry: JSON) throws -> Drafts {
        func ids(_ value: JSON?) -> [Int] { (value?.array ?? []).compactMap(\.int) }
        let passes = (entry["passes"]?.array ?? []).map {
            Drafts.Pass(drafted: ids($0["drafted"]), confidence: ids($0["confidence"]), accepted: $0["accepted"]?.int ?? -1)
        }
        return Drafts(
            promptIds: ids(entry["prompt_ids"]), draftTokens: try #require(entry["draft_tokens"]?.int), passes: passes,
            tokenIds: ids(entry["token_ids"]), sampling: try sampling(entry["sampling"]),
            sampled: (entry["sampled"]?.array ?? []).map(ids))
    }

    private static func readPictured(_ entry: JSON) throws -> Pictured {
        func ids(_ value: JSON?) -> [Int] { (value?.array ?? []).compactMap(\.int) }
        func text(_ key: String) throws -> String { try #require(entry[key]?.string) }
        return Pictured(
            prompt: try text("prompt"), images: (entry["images"]?.array ?? []).compactMap(\.string),
            views: (entry["views"]?.array ?? []).map { ($0.array ?? []).map(ids) }, promptIds: ids(entry["prompt_ids"]),
            positionIds: (entry["position_ids"]?.array ?? []).map(ids), pixelValues: try text("pixel_values"),
            features: try text("features"), logits: try text("logits"), tokenIds: ids(entry["token_ids"]), name: try text("name"))
    }

    private static func read(_ entry: JSON) throws -> Case {
        func ids(_ key: String) -> [Int] { (entry[key]?.array ?? []).compactMap(\.int) }
        return Case(
            name: try #require(entry["name"]?.string),
            engine: try #require(EngineChoice(rawValue: entry["engine"]?.string ?? "")),
            prompt: entry["prompt"]?.string, promptIds: ids("prompt_ids"), stepIds: ids("step_ids"),
            keptTokens: entry["kept_tokens"]?.int ?? 0, tokenIds: ids("token_ids"),
            sampling: try sampling(entry["sampling"]), text: entry["text"]?.string,
            logits: try #require(entry["logits"]?.string),
            vocabSize: try #require(entry["logits_shape"]?.array?.last?.int))
    }

    private static func sampling(_ json: JSON?) throws -> SamplingOptions {
        guard let json, json != .null else { return .greedy }
        func number(_ key: String, _ fallback: Double) -> Double {
            switch json[key] {
            case .double(let value): return value
            case .int(let value): return Double(value)
            default: return fallback
            }
        }
        return try SamplingOptions(
            temperature: number("temperature", 0), topK: Int(number("top_k", 0)), topP: number("top_p", 1),
            minP: number("min_p", 0), repetitionPenalty: number("repetition_penalty", 1), seed: UInt64(number("seed", 0)))
    }

    /// Row i: what token i was chosen from.
    func logits(_ test: Case) throws -> Data { try data(test.logits) }

    func data(_ name: String) throws -> Data { try Data(contentsOf: folder.appending(path: name)) }

    func pictures(_ test: Pictured) throws -> [Picture] {
        try test.images.map { try Picture(file: folder.appending(path: $0)) }
    }
}

/// All tests that run a model, one after another: they count threads, and the pool of threads is the process's.
@Suite(
    .serialized,
    .enabled(if: Fixtures.canRun, "no test bundles: make them with tools/make_mobile_fixtures.py, or set LESONNX_MOBILE"))
enum RuntimeTests {}
