import Foundation
import LesonnxScheduler

/// One step of the model: token ids in, logits out, walking embed, segments with their experts, and head.
///
/// Runs a bundle for one sequence, from one thread at a time. Owns the loader, which it closes at its end. It samples
/// nothing and decides nothing about loading.
final class Runner {
    let bundle: ModelBundle
    let loader: ExpertLoader
    let prefillChunkTokens: Int
    private(set) var tokenIds: [Int] = []
    /// Turns lookahead off where it does not pay; nil leaves it on.
    var governor: Governor?
    let states: LayerStates

    private var memoryBound: MemoryBound?
    private var sessions: [String: Session] = [:]
    private let segments: [Part]
    /// By the number of the MoE layer before, which they look from.
    private let lookaheads: [Part]
    private let embed: Part
    private let head: Part
    private let headCarriesStates: Bool
    private let hasSharedExperts: Bool
    private var buffers: [Int: StepBuffers] = [:]

    private var model: ModelFacts { bundle.manifest.model }

    init(
        _ bundle: ModelBundle, _ loader: ExpertLoader, _ environment: OrtEnvironment, prefillChunkTokens: Int? = nil
    ) throws {
        let manifest = bundle.manifest
        self.bundle = bundle
        self.loader = loader
        self.prefillChunkTokens = prefillChunkTokens ?? manifest.prefillChunkTokens
        states = try LayerStates(manifest)
        segments = manifest.parts.filter { $0.role == .segment }
        guard let embed = manifest.part(.embed), let head = manifest.part(.head) else {
            throw LesonnxError.bundle("a bundle has exactly one embed and one head part")
        }
        self.embed = embed
        self.head = head
        lookaheads = loader.usesLookahead
            ? segments.dropFirst().compactMap { manifest.part(.lookahead, layerIdx: $0.layerIdx) } : []
        headCarriesStates = manifest.states.contains { $0.part == head.name }
        hasSharedExperts = manifest.expertLayers.contains { $0.sharedKind != nil }
        for part in manifest.parts where part.role != .lookahead || loader.usesLookahead {
            let path = try bundle.file(part.path).path(percentEncoded: false)
            // A lookahead is a row of a router, run beside the experts.
            sessions[part.name] = try environment.session(path, part.role == .lookahead ? .single : .dense)
        }
    }

    deinit { loader.close() }

    /// Free sessions and experts; again does nothing. Nothing else may be called after it.
    func close() {
        loader.close()
        buffers.removeAll()
        sessions.removeAll()
    }

    /// Tokens of the sequence so far.
    var numTokens: Int { states.numTokens }

    /// Go back to the first `numTokens` tokens of the sequence.
    func rewind(to numTokens: Int) {
        states.rewind(to: numTokens)
        tokenIds.removeSubrange(numTokens...)
    }

    /// How many tokens of the sequence a prompt begins with; its last token never counts, since it must run.
    func commonTokens(_ prompt: [Int]) -> Int {
        zip(tokenIds, prompt.dropLast()).prefix { $0 == $1 }.count
    }

    // MARK: steps

    /// Append tokens in chunks; gives logits [1,V] of the last, or of all [n,V]. Throws `context` before any work, and
    /// `CancellationError` between two chunks where the task is cancelled. The tensor is valid until the next step.
    func prefill(_ ids: [Int], allLogits: Bool = false) throws -> Tensor {
        if ids.isEmpty {
            throw LesonnxError.input("the prompt is empty: at least one token is needed")
        }
        let total = numTokens + ids.count
        if total > states.maxTokens {
            throw LesonnxError.context("\(total) tokens do not fit the model's context of \(states.maxTokens)")
        }
        let all = allLogits ? Tensor(.float32, [ids.count, model.vocabSize]) : nil
        for start in stride(from: 0, to: ids.count, by: prefillChunkTokens) {
            try Task.checkCancellation()
            let chunk = Array(ids[start..<min(start + prefillChunkTokens, ids.count)])
            let isLast = start + chunk.count == ids.count
            let wanted = allLogits ? Array(chunk.indices) : isLast ? [chunk.count - 1] : []
            let logits = try step(chunk, logitRows: wanted)
            if let all {
                (all.pointer + start * model.vocabSize * 4).copyMemory(from: logits.pointer, byteCount: logits.byteCount)
            } else if isLast {
                return logits
            }
        }
        return all ?? Tensor(.float32, [0, model.vocabSize])
    }

    /// Run T tokens in one pass; logits [R,V] of the rows asked for (no head where there are none). The tensor is valid until the
    /// next step.
    func step(_ ids: [Int], logitRows: [Int]) throws -> Tensor {
        let rows = ids.count
        if let wrong = ids.first(where: { $0 < 0 || $0 >= model.vocabSize }) {
            throw LesonnxError.input("token id \(wrong) is outside 0..\(model.vocabSize - 1)")
        }
        let total = numTokens + rows
        if total > states.capacityTokens {
            // The experts give way before the caches grow: the budget holds at every moment.
            try shareMemory(capacityTokens: states.capacity(for: total))
            buffers.removeAll()
            try states.reserve(total)
        }
        let buffers = buffers(for: rows)
        for (row, id) in ids.enumerated() {
            buffers.inputIds[Int64.self][row] = Int64(id)
            buffers.positionIds[Int64.self][row] = Int64(numTokens + row)
        }
        states.begin(rows: rows)
        try loader.beginStep(rows: rows)
        // Of steps of one row the governor knows which side is faster; a prefill has too much to read not to look ahead.
        let isGoverned = rows == 1 && governor != nil
        let looksAhead = loader.usesLookahead && (!isGoverned || governor?.wants() == true)
        let stepBegan = secondsNow()
        var denseSeconds = 0.0
        var began = stepBegan
        try run(embed, place: nil, buffers)
        for (place, part) in segments.enumerated() {
            try run(part, place: place, buffers)
            let work = try work(place, buffers)
            denseSeconds += secondsNow() - began
            try loader.runLayer(place, work, looksAhead ? try prediction(after: place, buffers) : nil)
            began = secondsNow()
        }
        let logits = try runHead(logitRows, buffers)
        let ended = secondsNow()
        loader.note(denseSeconds: denseSeconds + ended - began)
        if isGoverned {
            governor?.took(seconds: ended - stepBegan)
        }
        states.commit(rows: rows)
        tokenIds += ids
        return logits
    }

    /// What the router of MoE layer number `place` asks for.
    private func work(_ place: Int, _ buffers: StepBuffers) throws -> LayerWork {
        try LayerWork(
            first: loader.first[place], numExperts: loader.layers[place].numExperts, topkIds: buffers.topkIds,
            hidden: buffers.moeInput, expertOut: buffers.expertOut, sharedOut: buffers.sharedOut)
    }

    /// The prediction of the MoE layer after number `place`; nil where there is none.
    private func prediction(after place: Int, _ buffers: StepBuffers) throws -> Prediction? {
        if place + 1 == segments.count {
            return nil
        }
        if hasSharedExperts {
            // What an earlier layer left there must not count as this layer's.
            buffers.sharedOut.zero()
        }
        let binding = try binding(lookaheads[place], place: place + 1, buffers)
        let (ready, scores) = (buffers.ready, buffers.lookaheadScores)
        return { places in
            _ = ready[Bool.self].update(fromContentsOf: places)
            try binding.run()
            return fixedScores(UnsafeBufferPointer(scores[Float.self]))
        }
    }

    /// The head on some rows; without any it still runs where it carries states (dense layers come last).
    private func runHead(_ logitRows: [Int], _ buffers: StepBuffers) throws -> Tensor {
        let none = Tensor(.float32, [0, model.vocabSize])
        if logitRows.isEmpty && !headCarriesStates {
            return none
        }
        if logitRows.count > 1 {
            let logits = Tensor(.float32, [logitRows.count, model.vocabSize])
            try bindHead(buffers, Tensor(logitRows.map(Int64.init)), logits).run()
            return logits
        }
        let binding = try buffers.head ?? bindHead(buffers, buffers.logitRows, buffers.logits)
        buffers.head = binding
        buffers.logitRows[Int64.self][0] = Int64(logitRows.first ?? 0)
        try binding.run()
        return logitRows.isEmpty ? none : buffers.logits
    }

    // MARK: bindings

    /// The tensors of this width; beside decode's one row, only the last width is kept.
    private func buffers(for rows: Int) -> StepBuffers {
        if let known = buffers[rows] {
            return known
        }
        buffers = buffers.filter { $0.key == 1 }
        let made = StepBuffers(model, rows: rows)
        buffers[rows] = made
        return made
    }

    private func run(_ part: Part, place: Int?, _ buffers: StepBuffers) throws {
        try binding(part, place: place, buffers).run()
    }

    private func session(_ part: Part) throws -> Session {
        guard let session = sessions[part.name] else { throw LesonnxError.failure("part \(part.name) is not loaded") }
        return session
    }

    /// A part bound to these tensors; `place` counts the segments before it.
    private func binding(_ part: Part, place: Int?, _ buffers: StepBuffers) throws -> Binding {
        if let known = buffers.bindings[part.name] {
            return known
        }
        var outputs: [String: Tensor]
        switch part.role {
        case .embed:
            outputs = ["hidden": buffers.hidden]
        case .lookahead:
            outputs = ["scores": buffers.lookaheadScores]
        case .segment, .head:
            let out = buffers.streams[(place ?? 0) % 2]
            outputs = [
                "residual_out": out.residual, "moe_input": buffers.moeInput, "topk_ids": buffers.topkIds,
                "topk_weights_out": out.topkWeights, "router_scores": buffers.routerScores,
            ]
            if part.outputs.contains(where: { $0.name == "shared_weights_out" }) {
                outputs["shared_weights_out"] = out.sharedWeights
            }
            outputs.merge(stateOutputs(part)) { first, _ in first }
        }
        let made = try Binding(session(part), inputs: inputs(part, place: place ?? 0, buffers), outputs: outputs)
        buffers.bindings[part.name] = made
        return made
    }

    private func bindHead(_ buffers: StepBuffers, _ rows: Tensor, _ logits: Tensor) throws -> Binding {
        var inputs = inputs(head, place: segments.count, buffers)
        inputs["logit_rows"] = rows
        var outputs = stateOutputs(head)
        outputs["logits"] = logits
        return try Binding(session(head), inputs: inputs, outputs: outputs)
    }

    /// The tensors a part reads; `place` counts the segments before it.
    private func inputs(_ part: Part, place: Int, _ buffers: StepBuffers) -> [String: Tensor] {
        let before = buffers.streams[(place + 1) % 2]
        var known = [
            "input_ids": buffers.inputIds, "hidden": buffers.hidden, "residual": before.residual,
            "topk_weights": before.topkWeights, "shared_weights": before.sharedWeights, "expert_out": buffers.expertOut,
            "shared_out": buffers.sharedOut, "ready": buffers.ready, "position_ids": buffers.positionIds,
            "seqlens_k": states.seqlensK, "total_sequence_length": states.totalSequenceLength,
        ]
        for state in bundle.manifest.states where state.part == part.name {
            known[state.input] = states.tensors[state.name]
        }
        return known.filter { name, _ in part.inputs.contains { $0.name == name } }
    }

    private func stateOutputs(_ part: Part) -> [String: Tensor] {
        var outputs: [String: Tensor] = [:]
        for state in bundle.manifest.states where state.part == part.name {
            outputs[state.output] = states.tensors[state.name]
        }
        return outputs
    }

    // MARK: memory

    /// Bound the process: experts get what is left, less as caches grow. Throws `budget` if that is too little.
    ///
    /// Call once, with all sessions open and before the first step.
    func boundMemory(_ memoryBudgetBytes: Int, expertBudgetBytes: Int?) throws {
        try warmUp()
        let chunk = prefillChunkTokens
        let held = 2 * StepBuffers.bytes(model, rows: chunk) + chunk * model.vocabSize / 8
        memoryBound = MemoryBound(
            budgetBytes: memoryBudgetBytes, fixedBytes: Memory.currentBytes() + held + MemoryBound.spareBytes,
            expertBudgetBytes: expertBudgetBytes)
        try shareMemory(capacityTokens: states.capacity(for: 1))
    }

    /// Run every dense part once on nothing, so that all the weights it maps are counted as this process's.
    ///
    /// What it leaves in the attention caches is written over by the first step.
    private func warmUp() throws {
        try states.reserve(1)
        states.begin(rows: 1)
        let buffers = buffers(for: 1)
        try run(embed, place: nil, buffers)
        for (place, part) in segments.enumerated() {
            try run(part, place: place, buffers)
        }
        for (place, part) in lookaheads.enumerated() {
            try run(part, place: place + 1, buffers)
        }
        _ = try runHead([0], buffers)
    }

    /// Give the experts what a capacity of attention caches leaves them.
    private func shareMemory(capacityTokens: Int) throws {
        guard let bound = memoryBound else { return }
        let stateBytes = states.bytes(at: capacityTokens)
        let left = Int(Double(bound.budgetBytes - bound.fixedBytes - stateBytes) / loader.engine.memoryPerByte)
        let least = loader.keepsAll ? bundle.expertBytes : bundle.leastBudgetBytes
        if left < least {
            throw LesonnxError.budget(
                "the memory budget is \(bound.budgetBytes) bytes; runtime, dense parts and a prefill chunk may take "
                    + "\(bound.fixedBytes), attention caches of \(capacityTokens) tokens \(stateBytes), and the experts need "
                    + "at least \(least)")
        }
        try loader.pressure(min(left, bound.expertBudgetBytes ?? bundle.expertBytes))
    }

    /// What the user, or the system, grants the experts from the next step on; attention caches may leave them less. Throws
    /// `budget` where it is too small; nothing changes then.
    func grant(expertBudgetBytes: Int) throws {
        let bytes = min(expertBudgetBytes, bundle.expertBytes)
        if loader.keepsAll && bytes < bundle.expertBytes {
            throw LesonnxError.budget("schedule resident keeps all experts, which take \(bundle.expertBytes) bytes")
        }
        if memoryBound == nil {
            try loader.pressure(bytes)
            return
        }
        let before = memoryBound
        memoryBound?.expertBudgetBytes = bytes
        do {
            try shareMemory(capacityTokens: max(states.capacityTokens, states.capacity(for: 1)))
        } catch {
            memoryBound = before
            throw error
        }
    }
}

/// What the process may take, what it takes beside states and experts, and what the user grants the experts.
private struct MemoryBound {
    /// What ONNX Runtime and Swift take beside what is counted.
    static let spareBytes = 48 << 20

    let budgetBytes: Int
    let fixedBytes: Int
    var expertBudgetBytes: Int?
}
