import Foundation
import Lesonnx
import LesonnxScheduler

/// `run BUNDLE`: generate from a prompt; the same options and the same JSON as `lesonnx run`.
enum RunCommand {
    static let usage = """
        run BUNDLE --prompt TEXT | --prompt-ids 1,2,3 [--image FILE]...
            [--schedule on-demand|cache|les|resident] [--engine auto|kernel|session] [--policy lru|lfu|les]
            [--[no-]compute-first] [--[no-]lookahead] [--loaders N] [--threads N] [--prefill-chunk TOKENS]
            [--accelerate auto|off|cpu] [--draft none|ngram|draft-model|dspark|mtp] [--draft-model BUNDLE]
            [--expert-budget BYTES] [--memory-budget BYTES] [--max-new-tokens N] [--ignore-eos] [--stop TEXT]
            [--temperature X] [--top-k N] [--top-p X] [--min-p X] [--repetition-penalty X] [--seed N] [--json]
        """
    static let flags: Set<String> = [
        "--json", "--ignore-eos", "--compute-first", "--no-compute-first", "--lookahead", "--no-lookahead",
    ]

    /// What `--json` prints, under the names of `lesonnx run --json`.
    private struct Report: Encodable {
        var text: String
        var tokens: [Int]
        var promptTokens: Int
        var pictures: Int
        var imageTokens: Int
        var visionMs: Double
        var finishReason: String?
        var prefillMs: Double
        var decodeMs: Double
        var tokensPerS: Double
        var loads: Int
        var hits: Int
        var late: Int
        var misses: Int
        var readBytes: Int
        var lookaheadLoads: Int
        var lookaheadUsed: Int
        var lookaheadWasted: Int
        var stallMs: Double
        var expertMs: Double
        var denseMs: Double
        var peakMemoryBytes: Int
        var expertBytes: Int
        var schedule: String
        var engine: String
        var expertBudgetBytes: Int
        var draft: String
        var drafts: DraftCounts?
    }

    static func run(_ words: some Sequence<String>) async throws {
        var arguments = try Arguments(words, flags: flags)
        let folder = try arguments.next("a bundle's folder")
        let prompt = try prompt(&arguments)
        var images: [Picture] = []
        while let file = arguments.text("--image") {
            images.append(try Picture(file: URL(filePath: file)))
        }
        let options = try loadOptions(&arguments)
        let generation = try generationOptions(&arguments)
        let isJSON = arguments.flag("--json")
        try arguments.end()

        let model = try await Model.load(URL(filePath: folder), options)
        for note in await model.notes {
            say("note: \(note)")
        }
        do {
            try await generate(model, prompt, images, generation, isJSON)
        } catch {
            await model.close()
            throw error
        }
        await model.close()
    }

    private static func generate(
        _ model: Model, _ prompt: Prompt, _ images: [Picture], _ options: GenerationOptions, _ isJSON: Bool
    ) async throws {
        let generation = try await model.generate(prompt, options, images: images)
        var text = ""
        for try await token in generation.tokens {
            text += token.text
            if !isJSON {
                FileHandle.standardOutput.write(Data(token.text.utf8))
            }
        }
        let report = await report(model, generation, text)
        if isJSON {
            let encoder = JSONEncoder()
            encoder.keyEncodingStrategy = .convertToSnakeCase
            encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
            FileHandle.standardOutput.write(try encoder.encode(report) + Data("\n".utf8))
        } else {
            print()
            let prefill = (report.prefillMs / 1e3).formatted(.number.precision(.fractionLength(2)))
            let speed = report.tokensPerS.formatted(.number.precision(.fractionLength(1)))
            say(
                "[\(pictures(report))\(report.promptTokens) prompt tokens in \(prefill) s, \(report.tokens.count) generated at \(speed) tokens/s; "
                    + "\(report.loads) expert loads, \(formatBytes(report.readBytes)) read; \(summary(report.drafts))"
                    + "experts \(formatBytes(report.expertBytes)), budget \(formatBytes(report.expertBudgetBytes)); "
                    + "process peak \(formatBytes(report.peakMemoryBytes))]")
        }
    }

    /// What the prompt's pictures took; nothing without.
    private static func pictures(_ report: Report) -> String {
        if report.pictures == 0 {
            return ""
        }
        let seconds = (report.visionMs / 1e3).formatted(.number.precision(.fractionLength(2)))
        return "\(report.pictures) picture\(report.pictures == 1 ? "" : "s") of \(report.imageTokens) tokens read in \(seconds) s; "
    }

    /// How many drafted tokens stayed; nothing without a drafter.
    private static func summary(_ drafts: DraftCounts?) -> String {
        guard let drafts else { return "" }
        let first = drafts.judged[0] > 0 ? ", \(100 * drafts.accepted[0] / drafts.judged[0])% of the first ones" : ""
        return "\(drafts.numAccepted) of \(drafts.numDrafted) drafted tokens accepted\(first); "
    }

    private static func report(_ model: Model, _ generation: Generation, _ text: String) async -> Report {
        let report = await generation.report
        let telemetry = await model.telemetry
        return Report(
            text: text, tokens: report.tokenIds, promptTokens: report.promptTokens,
            pictures: report.pictures, imageTokens: report.imageTokens, visionMs: report.visionMs,
            finishReason: report.finishReason?.rawValue, prefillMs: report.prefillMs, decodeMs: report.decodeMs,
            tokensPerS: report.tokensPerS, loads: telemetry.loads, hits: telemetry.hits, late: telemetry.late,
            misses: telemetry.misses, readBytes: telemetry.readBytes, lookaheadLoads: telemetry.lookaheadLoads,
            lookaheadUsed: telemetry.lookaheadUsed, lookaheadWasted: telemetry.lookaheadWasted, stallMs: telemetry.stallMs,
            expertMs: telemetry.expertMs, denseMs: telemetry.denseMs, peakMemoryBytes: Memory.peakBytes(),
            expertBytes: model.bundle.expertBytes, schedule: model.options.schedule.rawValue, engine: await model.engineName,
            expertBudgetBytes: await model.expertBudgetBytes, draft: model.options.draft.rawValue, drafts: report.drafts)
    }

    private static func prompt(_ arguments: inout Arguments) throws(LesonnxError) -> Prompt {
        switch (arguments.text("--prompt"), arguments.text("--prompt-ids")) {
        case (let text?, nil):
            return .text(text)
        case (nil, let list?):
            let words = list.split(separator: ",", omittingEmptySubsequences: false)
            let ids = words.compactMap { Int($0) }
            if ids.count < words.count {
                throw .input("--prompt-ids '\(list)' is not a list of token ids parted by commas")
            }
            return .ids(ids)
        default:
            throw .input("give exactly one of --prompt and --prompt-ids")
        }
    }

    private static func loadOptions(_ arguments: inout Arguments) throws(LesonnxError) -> LoadOptions {
        var options = LoadOptions()
        options.schedule = try arguments.choice("--schedule") ?? .les
        options.engine = try arguments.choice("--engine") ?? .auto
        options.policy = try arguments.choice("--policy")
        options.computeFirst = arguments.onOff("compute-first")
        options.lookahead = arguments.onOff("lookahead")
        options.numLoaders = try arguments.number("--loaders")
        options.numThreads = try arguments.number("--threads")
        options.prefillChunkTokens = try arguments.number("--prefill-chunk")
        options.accelerate = try arguments.choice("--accelerate") ?? .auto
        options.draft = try arguments.choice("--draft") ?? .none
        options.draftModel = arguments.text("--draft-model").map { URL(filePath: $0) }
        options.expertBudgetBytes = try arguments.bytes("--expert-budget")
        options.memoryBudgetBytes = try arguments.bytes("--memory-budget")
        return options
    }

    private static func generationOptions(_ arguments: inout Arguments) throws(LesonnxError) -> GenerationOptions {
        let sampling = try SamplingOptions(
            temperature: arguments.number("--temperature") ?? 0, topK: arguments.number("--top-k") ?? 0,
            topP: arguments.number("--top-p") ?? 1, minP: arguments.number("--min-p") ?? 0,
            repetitionPenalty: arguments.number("--repetition-penalty") ?? 1, seed: arguments.number("--seed") ?? 0)
        var stops: [String] = []
        while let stop = arguments.text("--stop") {
            stops.append(stop)
        }
        return GenerationOptions(
            maxNewTokens: try arguments.number("--max-new-tokens"), sampling: sampling, stop: stops,
            ignoresEos: arguments.flag("--ignore-eos"))
    }
}
