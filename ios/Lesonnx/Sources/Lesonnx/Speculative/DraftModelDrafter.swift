import Foundation
import LesonnxScheduler

/// The drafter `draft-model`: a second, smaller bundle with the same tokenizer, all of its experts in memory.
///
/// It runs one token after another on its own sequence, which is rewound to what it has in common with the target's. Owns that
/// bundle's runner. It knows nothing of the target but its tokens.
final class DraftModelDrafter: Drafter {
    let name = DrafterName.draftModel
    let maxTokens = maxDraftTokens
    let isFree = false
    private let runner: Runner

    /// Throws `input` where the bundle's tokens are not the target's.
    init(for target: ModelBundle, _ bundle: ModelBundle, _ engine: EngineChoice, _ environment: OrtEnvironment) throws {
        try checkSameTokens(target, bundle)
        var options = LoadOptions()
        options.schedule = .resident
        let config = options.schedulerConfig
        let made = try makeEngine(engine, bundle, environment).engine
        let loader = try ExpertLoader(bundle, made, config, budgetBytes: bundle.expertBytes, numLoaders: config.maxLoads)
        do {
            runner = try Runner(bundle, loader, environment)
            // So that what it maps is counted as this process's before a memory budget is shared out.
            try runner.warmUp()
        } catch {
            loader.close()
            throw error
        }
    }

    /// What it will take beside that: its experts, which are read when it runs first.
    var lateBytes: Int { runner.bundle.expertBytes }

    /// As `Drafter.propose`. Runs what the target's sequence has become since, then a token a step.
    func propose(after tokenIds: [Int], maxTokens: Int, _ sampler: inout DraftSampler) throws -> Draft {
        let most = min(maxTokens, self.maxTokens, runner.states.maxTokens - tokenIds.count)
        if most < 1 {
            return .none
        }
        try runner.rewind(to: runner.commonTokens(tokenIds))
        var logits = try runner.prefill(Array(tokenIds[runner.numTokens...]))
        var draft = Draft(probabilities: sampler.draws ? [] : nil)
        while true {
            let (id, distribution) = try sampler.choose(UnsafeBufferPointer(logits[Float.self]))
            draft.tokenIds.append(id)
            if let distribution {
                draft.probabilities?.append(distribution)
            }
            if draft.tokenIds.count == most {
                return draft
            }
            logits = try runner.step([id], logitRows: [0])
        }
    }

    /// Nothing to do before the next proposal, which compares sequences.
    func rewind(to _: Int) {}

    func close() { runner.close() }
}

/// Throws `input` where two vocabularies differ: in size, or in the tokenizer's file where both have one.
private func checkSameTokens(_ target: ModelBundle, _ bundle: ModelBundle) throws {
    let place = "\(bundle.directory.path(percentEncoded: false)): cannot draft"
    let (ours, theirs) = (target.manifest.model.vocabSize, bundle.manifest.model.vocabSize)
    if ours != theirs {
        throw LesonnxError.input("\(place): its vocabulary has \(theirs) tokens, the target's \(ours)")
    }
    if let own = try tokenizerData(target), let other = try tokenizerData(bundle), own != other {
        let path = target.directory.path(percentEncoded: false)
        throw LesonnxError.input("\(place): its tokenizer is not the same as that of \(path)")
    }
}

private func tokenizerData(_ bundle: ModelBundle) throws -> Data? {
    guard let path = bundle.manifest.tokenizer?.jsonPath else { return nil }
    let file = try bundle.file(path)
    guard let data = try? Data(contentsOf: file) else {
        throw LesonnxError.input("\(file.path(percentEncoded: false)): not readable")
    }
    return data
}
