import LesonnxScheduler

/// What to generate. `maxNewTokens` nil means up to 256, less where the context ends earlier.
///
/// `stop` strings end the text before themselves, wherever tokens begin and end.
public struct GenerationOptions: Equatable, Sendable {
    public static let defaultMaxNewTokens = 256

    public var maxNewTokens: Int?
    public var sampling = SamplingOptions.greedy
    public var stop: [String] = []
    public var ignoresEos = false

    public init(maxNewTokens: Int? = nil, sampling: SamplingOptions = .greedy, stop: [String] = [], ignoresEos: Bool = false) {
        self.maxNewTokens = maxNewTokens
        self.sampling = sampling
        self.stop = stop
        self.ignoresEos = ignoresEos
    }

    /// How many tokens may come after the prompt. Throws `context` where what was asked for does not fit.
    func tokenLimit(promptTokens: Int, maxTokens: Int) throws(LesonnxError) -> Int {
        let room = maxTokens - promptTokens
        if room < 1 {
            throw .context("a prompt of \(promptTokens) tokens leaves no room in the model's context of \(maxTokens)")
        }
        guard let wanted = maxNewTokens else { return min(Self.defaultMaxNewTokens, room) }
        if wanted < 1 {
            throw .input("maxNewTokens is \(wanted), expected at least 1")
        }
        if wanted > room {
            throw .context(
                "a prompt of \(promptTokens) tokens and \(wanted) new ones do not fit the model's context of \(maxTokens)")
        }
        return wanted
    }
}

/// One generated token. `text` is what became certain with it, perhaps nothing; all texts in a row are the output.
///
/// `id` is nil for text that was held back until the end.
public struct Token: Equatable, Sendable {
    public let id: Int?
    public let text: String

    public init(id: Int?, text: String) {
        self.id = id
        self.text = text
    }
}

public enum FinishReason: String, Equatable, Sendable {
    case eos, stop, length
}

/// How a generation went; complete once it has ended.
public struct GenerationReport: Equatable, Sendable {
    public var promptTokens = 0
    public var reusedTokens = 0
    public var tokenIds: [Int] = []
    public var finishReason: FinishReason?
    /// Pictures of the prompt, its tokens that are theirs, and what reading those took that were not known.
    public var pictures = 0
    public var imageTokens = 0
    public var visionMs = 0.0
    public var prefillMs = 0.0
    public var decodeMs = 0.0
    /// nil where nothing could be drafted.
    public var drafts: DraftCounts?

    public init() {}

    /// Decode speed: tokens after the first, which the prefill gives, by the time they took; what the caller does between two
    /// tokens does not count.
    public var tokensPerS: Double {
        tokenIds.count > 1 && decodeMs > 0 ? Double(tokenIds.count - 1) / (decodeMs / 1e3) : 0
    }
}

/// The state of one generation between two tokens; used from the runner's thread.
struct Generator {
    private(set) var report = GenerationReport()
    private let prompt: [Int]
    private let pictures: PromptPictures?
    private let limit: Int
    private let eos: Set<Int>
    private let reuses: Bool
    private var prefillBegan = 0.0
    private var sampler: Sampler
    private var decoder: StreamDecoder?
    private var stop: StopChecker
    private var stage = Stage.begin

    private enum Stage {
        case begin
        /// Pictures are read.
        case see
        /// What of the prompt has not run; its last token always runs, since it gives the logits.
        case prefill(rest: ArraySlice<Int>)
        /// Tokens that are known and not given out yet; where there are none, the last one given out is the next to run.
        case decode(last: Int, coming: ArraySlice<Int>)
        case flush
        case end
    }

    /// Throws `input` or `context` for a prompt or options that cannot be served.
    init(
        _ prompt: [Int], _ options: GenerationOptions, _ model: ModelFacts, maxTokens: Int,
        decoding: (any TokenDecoding)?, reuses: Bool, pictures: PromptPictures? = nil
    ) throws(LesonnxError) {
        if prompt.isEmpty {
            throw .input("the prompt is empty: at least one token is needed")
        }
        if let wrong = prompt.first(where: { $0 < 0 || $0 >= model.vocabSize }) {
            throw .input("token id \(wrong) is outside 0..\(model.vocabSize - 1)")
        }
        if !options.stop.isEmpty && decoding == nil {
            throw .input("stop strings need a tokenizer, which this bundle lacks")
        }
        limit = try options.tokenLimit(promptTokens: prompt.count, maxTokens: maxTokens)
        sampler = Sampler(options.sampling)
        try sampler.accept(all: prompt)
        decoder = decoding.map { StreamDecoder($0) }
        stop = try StopChecker(options.stop)
        eos = options.ignoresEos ? [] : Set(model.eosTokenIds)
        self.prompt = prompt
        self.pictures = pictures
        self.reuses = reuses
        report.promptTokens = prompt.count
        report.pictures = pictures?.keys.count ?? 0
        report.imageTokens = pictures?.numImageTokens ?? 0
    }

    /// Read a crop of a picture, or run a chunk of the prompt, unless at most one is left, which gives the first token; whether it did.
    mutating func runChunk(_ runner: Runner, _ speculator: Speculator?, _ sight: Sight? = nil) throws -> Bool {
        if case .begin = stage {
            // The prompt, but for what the sequence begins with already.
            report.reusedTokens = reuses ? runner.commonTokens(prompt, pictures) : 0
            try runner.rewind(to: report.reusedTokens)
            speculator?.begin(prompt, numKept: report.reusedTokens, sampler)
            try sight?.begin(pictures, from: report.reusedTokens, runner)
            stage = .see
        }
        if case .see = stage {
            let began = secondsNow()
            if let pictures, let sight, try sight.seeCrop(pictures, runner) {
                report.visionMs += (secondsNow() - began) * 1e3
                return true
            }
            prefillBegan = secondsNow()
            report.visionMs += pictures == nil ? 0 : (prefillBegan - began) * 1e3
            stage = .prefill(rest: prompt.dropFirst(report.reusedTokens))
        }
        guard case .prefill(let rest) = stage, rest.count > runner.prefillChunkTokens else { return false }
        _ = try runner.step(Array(rest.prefix(runner.prefillChunkTokens)), logitRows: [], pictures: pictures)
        stage = .prefill(rest: rest.dropFirst(runner.prefillChunkTokens))
        return true
    }

    /// The next token; nil at the end. For the first, `runChunk` is to be called until it gives false.
    mutating func next(_ runner: Runner, _ speculator: Speculator?) throws -> Token? {
        defer { report.drafts = speculator?.counts }
        switch stage {
        case .begin, .see:
            throw LesonnxError.failure("a token was asked for before the prompt has run")
        case .prefill(let rest):
            let logits = try runner.prefill(Array(rest), pictures: pictures)
            let ended = secondsNow()
            report.prefillMs = (ended - prefillBegan) * 1e3
            let id = try sampler.sample(UnsafeBufferPointer(logits[Float.self]))
            report.decodeMs += (secondsNow() - ended) * 1e3
            return try take([id], runner)
        case .decode(let last, let coming):
            if !coming.isEmpty {
                return try take(coming, runner)
            }
            let began = secondsNow()
            let ids = try step(after: last, runner, speculator)
            report.decodeMs += (secondsNow() - began) * 1e3
            return try take(ids[...], runner)
        case .flush:
            return flush()
        case .end:
            return nil
        }
    }

    /// What comes after the last token, which has not run: one token, or several where drafts were right.
    private mutating func step(after last: Int, _ runner: Runner, _ speculator: Speculator?) throws -> [Int] {
        if let speculator {
            let most = limit - report.tokenIds.count
            return try speculator.next(after: last, most: most, ends: eos, &sampler).tokenIds
        }
        let logits = try runner.step([last], logitRows: [0])
        return [try sampler.sample(UnsafeBufferPointer(logits[Float.self]))]
    }

    /// The first of tokens that are known; the end may be one, and is not given out.
    private mutating func take(_ ids: ArraySlice<Int>, _ runner: Runner) throws -> Token? {
        let id = ids[ids.startIndex]
        report.tokenIds.append(id)
        if eos.contains(id) {
            report.finishReason = .eos
            try leave(runner)
            return flush()
        }
        try sampler.accept(id)
        let text = decoder?.push(id) ?? ""
        let shown = stop.push(text)
        if stop.stoppedBy != nil {
            report.finishReason = .stop
            stage = .end
            try leave(runner)
        } else if report.tokenIds.count == limit {
            report.finishReason = .length
            stage = .flush
            try leave(runner)
        } else {
            stage = .decode(last: id, coming: ids.dropFirst())
        }
        return Token(id: id, text: shown)
    }

    /// Go back over what was drafted and is not given out: as without drafts, the last token has not run.
    func leave(_ runner: Runner) throws {
        if !report.tokenIds.isEmpty {
            try runner.rewind(to: min(runner.numTokens, prompt.count + report.tokenIds.count - 1))
        }
    }

    /// What was held back: half a character, or the beginning of a stop string.
    private mutating func flush() -> Token? {
        stage = .end
        guard let rest = decoder?.flush() else { return nil }
        let text = stop.push(rest) + stop.flush()
        return text.isEmpty ? nil : Token(id: nil, text: text)
    }
}
