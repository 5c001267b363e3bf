import Foundation
import LesonnxScheduler

/// A text, or the ids of its tokens.
public enum Prompt: Equatable, Sendable {
    case text(String)
    case ids([Int])
}

/// The tokens of one generation, as they come; iterate once. A step is run when its token is asked for: whoever stops asking, or
/// whose task is cancelled, stops the work at the end of the step under way (of a prompt, of the chunk). A cancelled task's loop
/// ends, or throws `CancellationError`; the report's `finishReason` is nil then. The report is complete at the end.
public struct Generation: Sendable {
    public let tokens: AsyncThrowingStream<Token, any Error>
    private let model: Model
    private let number: Int

    fileprivate init(_ model: Model, _ number: Int) {
        self.model = model
        self.number = number
        tokens = AsyncThrowingStream { try await model.next(of: number) }
    }

    /// How it goes, or went; empty once another generation of the model has begun or the model is closed.
    public var report: GenerationReport {
        get async { await model.report(of: number) }
    }

    /// Run to the end; the text of what had not been taken yet.
    public func text() async throws -> String {
        var text = ""
        for try await token in tokens {
            text += token.text
        }
        return text
    }
}

/// A loaded bundle, one sequence at a time. Its work is done on a thread of its own; calls wait for the step under way, which is
/// one token, or one chunk of a prompt.
///
/// Close it to free sessions, caches and experts at once, and to end its threads; dropping the last reference does so too.
public actor Model {
    public nonisolated let bundle: ModelBundle
    public nonisolated let options: LoadOptions
    /// nil where the bundle has none: prompts are token ids then, and tokens have no text.
    public nonisolated let tokenizer: (any Tokenizer)?
    /// What is worth a line to the user: another engine than the fastest, or too little memory to keep anything.
    public private(set) var notes: [String] = []
    /// The engine in use: `kernel` or `session`.
    public private(set) var engineName = ""

    nonisolated let executor = ThreadExecutor(name: "lesonnx")
    private var runner: Runner?
    private var speculator: Speculator?
    private var sight: Sight?
    private var generator: Generator?
    private var numGenerations = 0

    public nonisolated var unownedExecutor: UnownedSerialExecutor { executor.asUnownedSerialExecutor() }

    /// Load a bundle. Throws `bundle`, `budget` or `input`.
    public static func load(_ directory: URL, _ options: LoadOptions = LoadOptions()) async throws -> Model {
        try await load(ModelBundle(directory: directory), options)
    }

    /// Load a bundle that is open already.
    public static func load(_ bundle: ModelBundle, _ options: LoadOptions = LoadOptions()) async throws -> Model {
        try options.check()
        var tokenizer: (any Tokenizer)?
        if let path = bundle.manifest.tokenizer?.jsonPath {
            tokenizer = try BytePairTokenizer(file: bundle.file(path))
        }
        let model = Model(bundle, options, tokenizer)
        try await model.open()
        return model
    }

    private init(_ bundle: ModelBundle, _ options: LoadOptions, _ tokenizer: (any Tokenizer)?) {
        self.bundle = bundle
        self.options = options
        self.tokenizer = tokenizer
    }

    deinit { executor.retire() }

    private func open() throws {
        let environment = try OrtEnvironment.shared(numThreads: options.numThreads)
        let needed = bundle.manifest.onnxruntimeAtLeast
        if !isVersion(environment.library.version, atLeast: needed) {
            throw LesonnxError.bundle(
                "the bundle needs ONNX Runtime \(needed) or later, found \(environment.library.version)")
        }
        let config = options.schedulerConfig
        let budget = mostExpertBytes
        let least = config.resident ? bundle.expertBytes : bundle.leastBudgetBytes
        if budget < least {
            let what = config.resident ? "schedule resident keeps all experts," : "this bundle needs at least"
            throw LesonnxError.budget("the expert budget is \(budget) bytes; \(what) \(least)")
        }
        let (engine, note) = try makeEngine(options.engine, bundle, environment)
        let loader = try ExpertLoader(bundle, engine, config, budgetBytes: budget, numLoaders: config.maxLoads)
        do {
            let twins = try Twins(bundle, environment, options.accelerate, cache: options.providerCache)
            let runner = try Runner(
                bundle, loader, environment, prefillChunkTokens: options.prefillChunkTokens, twins: twins)
            if config.lookahead && options.lookahead == nil {
                runner.governor = Governor()
            }
            // Before the memory is bounded: a draft model takes its part of it.
            speculator = try makeDrafter(options, for: bundle, environment).map { Speculator(runner, $0) }
            if let bytes = options.memoryBudgetBytes {
                let lateBytes = (speculator?.drafter as? DraftModelDrafter)?.lateBytes ?? 0
                try runner.boundMemory(bytes, expertBudgetBytes: options.expertBudgetBytes, otherBytes: lateBytes)
            }
            self.runner = runner
            sight = bundle.manifest.vision.map { _ in Sight(bundle, environment) }
            notes = twins.notes
        } catch {
            speculator?.close()
            speculator = nil
            loader.close()
            throw error
        }
        engineName = engine.name
        notes = (note.map { [$0] } ?? []) + notes
        if config.retain && loader.expertBudgetBytes < bundle.tokenDemandBytes {
            notes.append(
                "the experts may take \(loader.expertBudgetBytes) bytes, less than the \(bundle.tokenDemandBytes) that one "
                    + "token uses: few can stay from one token to the next")
        }
    }

    private func openRunner() throws -> Runner {
        guard let runner else { throw LesonnxError.input("the model is closed") }
        return runner
    }

    // MARK: generation

    /// Generate from a text or token ids, from scratch. Throws `input` or `context` before any work for what cannot be served.
    /// An unfinished generation ends: asking it for more throws.
    ///
    /// A text has one placeholder a picture of `images`, in order (`vision.texts.placeholder`), or none: then they come first. Ids have
    /// one image token a picture (`vision.tokens.image`).
    public func generate(
        _ prompt: Prompt, _ options: GenerationOptions = GenerationOptions(), images: [Picture] = []
    ) throws -> Generation {
        switch prompt {
        case .ids(let ids):
            let (tokens, pictures) = try bundle.expand(ids, images, tokenizer)
            return try begin(tokens, options, reuses: false, pictures)
        case .text(let text):
            guard let tokenizer else {
                throw LesonnxError.input("\(bundle.directory.lastPathComponent): has no tokenizer; give token ids instead of text")
            }
            let marked = bundle.manifest.vision?.withPlaceholders(text, numPictures: images.count) ?? text
            let (tokens, pictures) = try bundle.expand(marked, images, tokenizer, addSpecialTokens: true)
            return try begin(tokens, options, reuses: false, pictures)
        }
    }

    /// Answer a conversation by the bundle's chat format; what the last answer computed is used again, as far as the pictures are the
    /// same. Throws `input` where the bundle has no such format: it completes texts and does not chat.
    public func chat(_ messages: [ChatMessage], _ options: GenerationOptions = GenerationOptions()) throws -> Generation {
        guard let format = bundle.manifest.tokenizer?.chatFormat, let tokenizer else {
            throw LesonnxError.input("\(bundle.directory.lastPathComponent): has no chat format; use generate")
        }
        let images = messages.flatMap(\.images)
        let texts = try messages.map { try bundle.marked($0) }
        let (tokens, pictures) = try bundle.expand(format.join(texts), images, tokenizer, addSpecialTokens: false)
        return try begin(tokens, options, reuses: true, pictures)
    }

    private func begin(
        _ prompt: [Int], _ options: GenerationOptions, reuses: Bool, _ pictures: PromptPictures?
    ) throws -> Generation {
        let runner = try openRunner()
        try generator?.leave(runner)
        sight?.leave()
        generator = try Generator(
            prompt, options, bundle.manifest.model, maxTokens: runner.states.maxTokens, decoding: tokenizer, reuses: reuses,
            pictures: pictures)
        numGenerations += 1
        return Generation(self, numGenerations)
    }

    fileprivate func next(of number: Int) async throws -> Token? {
        do {
            var runner = try runner(of: number)
            while try generator?.runChunk(runner, speculator, sight) == true {
                // Who waits has its turn between two crops or chunks: memory pressure cannot wait for a long prompt, nor should `close`.
                await Task.yield()
                runner = try self.runner(of: number)
            }
            return try generator?.next(runner, speculator)
        } catch {
            if let runner, let sight, sight.isReading, number == numGenerations {
                sight.stop(runner)
            }
            throw error
        }
    }

    /// The runner, where it may go on with this generation and its task wants that.
    private func runner(of number: Int) throws -> Runner {
        let runner = try openRunner()
        if number != numGenerations {
            throw LesonnxError.input("another generation of this model has begun")
        }
        try Task.checkCancellation()
        return runner
    }

    /// Tokens of the sequence that have run; 0 once closed.
    var numTokens: Int { runner?.numTokens ?? 0 }

    /// Whether eyes are open, and the crops that were read in all.
    var eyes: (areOpen: Bool, numCrops: Int) { (sight?.isOpen ?? false, sight?.numCrops ?? 0) }

    fileprivate func report(of number: Int) -> GenerationReport {
        number == numGenerations ? generator?.report ?? GenerationReport() : GenerationReport()
    }

    // MARK: what goes on

    /// Loads, bytes and times since the bundle was loaded or the last reset.
    public var telemetry: Telemetry { runner?.loader.telemetry ?? Telemetry() }

    /// Begin to count anew.
    public func resetTelemetry() { runner?.loader.resetTelemetry() }

    /// The first expert budget. It is no more than all experts take: half of what is given up at a warning must be of memory.
    nonisolated var mostExpertBytes: Int { min(options.expertBudgetBytes ?? bundle.expertBytes, bundle.expertBytes) }

    /// What the experts may take now; 0 once closed.
    public var expertBudgetBytes: Int { runner?.loader.expertBudgetBytes ?? 0 }

    /// Grant the experts another budget, at most the first one, from the next step on; what they give up goes back to the system.
    /// Throws `budget` where it is too small; nothing changes then.
    public func grant(expertBudgetBytes: Int) throws {
        try openRunner().grant(expertBudgetBytes: min(expertBudgetBytes, mostExpertBytes))
    }

    /// Free sessions, caches and experts. What is asked of the model after it throws.
    public func close() {
        speculator?.close()
        speculator = nil
        runner?.close()
        runner = nil
        generator = nil
        sight = nil
        executor.retire()
    }
}
