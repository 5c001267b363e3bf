import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

/// Verifies as much as is drafted, at most so many tokens: no test depends on the clock.
struct Always: LengthChoice {
    var length = maxDraftTokens
    var mayDraft: Bool { true }

    func ask(most: Int, isFree _: Bool, newBytes _: [Int]) -> Int { min(most, length) }

    func choose(drafted: Int, confidence _: [Int]?, isFree _: Bool, isDrawn _: Bool, newBytes _: [Int]) -> Int {
        min(drafted, length)
    }

    func passed(rows _: Int, passUs _: Int, stallUs _: Int, readBytes _: Int, newBytes _: [Int], newTokens _: Int, draftUs _: Int?) {}
    func judge(drafted _: Int, accepted _: Int, confidence _: [Int]?) {}
}

/// Drafts what plain decoding gave, each token wrong with some odds of 100.
final class Oracle: Drafter {
    let name = DrafterName.none
    let maxTokens = maxDraftTokens
    let isFree = true
    private let tokenIds: [Int]
    private let promptTokens: Int
    private let wrong: UInt32
    private let vocabSize: UInt32
    private var random = Pcg32(seed: 5)

    init(_ tokenIds: [Int], after promptTokens: Int, wrong: UInt32, vocabSize: Int) {
        (self.tokenIds, self.promptTokens, self.wrong, self.vocabSize) = (tokenIds, promptTokens, wrong, UInt32(vocabSize))
    }

    func propose(after ids: [Int], maxTokens: Int, _: inout DraftSampler) -> Draft {
        let coming = tokenIds.dropFirst(ids.count - promptTokens).prefix(maxTokens)
        return Draft(coming.map { random.nextUInt32() % 100 < wrong ? Int(random.nextUInt32() % vocabSize) : $0 })
    }

    func rewind(to _: Int) {}
    func close() {}
}

/// A bundle's runner with a prompt, and what it generates with drafts and without.
struct Drafting {
    let bundle: ModelBundle
    let runner: Runner
    let prompt: [Int]
    let tokenizer: (any Tokenizer)?

    /// `text` needs a bundle with a tokenizer; without it the prompt is that of the reference.
    init(
        _ name: String, text: String? = nil, engine: EngineChoice = .kernel, schedule: Schedule = .les, share: Int = 2,
        wrap: (any ExpertEngine) -> any ExpertEngine = { $0 }
    ) throws {
        let bundle = try Fixtures.bundle(name)
        let (reference, _) = try Fixtures.reference(name)
        let budget = max(bundle.leastBudgetBytes, bundle.expertBytes / share)
        runner = try Runners.make(bundle, reference, engine, schedule, budget, wrap: wrap)
        let tokenizer = try bundle.manifest.tokenizer?.jsonPath.map { try BytePairTokenizer(file: bundle.file($0)) }
        prompt = try text.map { try #require(tokenizer).encode($0, addSpecialTokens: true) } ?? reference.cases[0].promptIds
        (self.bundle, self.tokenizer) = (bundle, tokenizer)
    }

    func generator(
        _ count: Int, _ sampling: SamplingOptions = .greedy, stop: [String] = [], eos: Int? = nil, reuses: Bool = false,
        after prompt: [Int]? = nil
    ) throws -> Generator {
        let options = GenerationOptions(maxNewTokens: count, sampling: sampling, stop: stop, ignoresEos: eos == nil)
        let facts = try eos.map { try bundle.facts(endingWith: $0) } ?? bundle.manifest.model
        return try Generator(
            prompt ?? self.prompt, options, facts, maxTokens: runner.states.maxTokens, decoding: tokenizer, reuses: reuses)
    }

    /// Runs a generation to its end.
    func run(_ generator: Generator, _ speculator: Speculator? = nil) throws -> (report: GenerationReport, text: String) {
        var (generator, text) = (generator, "")
        while try generator.runChunk(runner, speculator) {}
        while let token = try generator.next(runner, speculator) {
            text += token.text
        }
        return (generator.report, text)
    }

    /// How likely each expert is used next, as its scheduler sees it.
    var odds: [[Int]] {
        let residency = runner.loader.scheduler.residency
        return residency.first.indices.map { residency.policy.odds(layer: $0) }
    }
}

extension ModelBundle {
    /// What the manifest says of the model, but for its end token.
    func facts(endingWith id: Int) throws -> ModelFacts {
        let document = try JSON(parsing: Data(contentsOf: file("manifest.json")))
        let entries = try #require(document["model"]?.object).map {
            $0.key == "eos_token_ids" ? JSON.Entry(key: $0.key, value: .array([.int(id)])) : $0
        }
        return try ModelFacts(Field(path: "model", value: .object(entries)))
    }
}
