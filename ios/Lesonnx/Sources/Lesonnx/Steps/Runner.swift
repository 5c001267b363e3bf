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
    var tokenIds: [Int] { history.tokenIds }
    /// Turns lookahead off where it does not pay; nil leaves it on.
    var governor: Governor?
    /// Whether steps with drafts may come: their tensors are then part of what the process takes.
    var takesDrafts = false
    /// Who is told what layers give, if anyone: only then are these outputs asked for. Whoever sets it closes it.
    var layerReader: (any LayerReader)? {
        didSet { buffers.removeAll() }
    }
    let states: LayerStates
    private var history: History
    /// The bundle's twins that are open here; nil where none are used.
    private(set) var twins: Twins?

    /// nil where only the experts are bounded.
    var memoryBound: MemoryBound?
    private var sessions: [String: Session] = [:]
    let segments: [Part]
    /// By the number of the MoE layer before, which they look from.
    let lookaheads: [Part]
    /// By the number of the MoE layer: what runs behind a router that speaks before its layer mixes tokens.
    let mixers: [Part?]
    let embed: Part
    private let head: Part
    private let headCarriesStates: Bool
    private let hasSharedExperts: Bool
    private var buffers: [Int: StepBuffers] = [:]
    /// Rows of the last step.
    private var stepRows = 0

    var model: ModelFacts { bundle.manifest.model }

    init(
        _ bundle: ModelBundle, _ loader: ExpertLoader, _ environment: OrtEnvironment, prefillChunkTokens: Int? = nil,
        twins: Twins? = nil
    ) throws {
        let manifest = bundle.manifest
        self.bundle = bundle
        self.loader = loader
        self.prefillChunkTokens = prefillChunkTokens ?? manifest.prefillChunkTokens
        self.twins = twins
        states = LayerStates(manifest, leastCapacityTokens: twins?.capacityTokens ?? 0)
        history = History(positionRows: manifest.positionRows)
        segments = manifest.parts.filter { $0.role == .segment }
        guard let embed = manifest.part(.embed), let head = manifest.part(.head) else {
            throw LesonnxError.bundle("a bundle has exactly one embed and one head part")
        }
        self.embed = embed
        self.head = head
        lookaheads = loader.usesLookahead
            ? segments.dropFirst().compactMap { manifest.part(.lookahead, layerIdx: $0.layerIdx) } : []
        mixers = segments.map { manifest.part(.mixer, layerIdx: $0.layerIdx) }
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
        twins = nil
    }

    /// Tokens of the sequence so far.
    var numTokens: Int { states.numTokens }

    /// Go back to the first `numTokens` tokens of the sequence. Throws `input` where its states do not reach them; nothing changes
    /// then.
    func rewind(to numTokens: Int) throws {
        try states.rewind(to: numTokens) { part, inputs, outputs in
            try Binding(session(part), inputs: inputs, outputs: outputs).run()
        }
        history.rewind(to: numTokens)
    }

    /// How many tokens of the sequence, to which it can be rewound, a prompt begins with; its last token never counts, since it must
    /// run. Image tokens are the same where their pictures are.
    func commonTokens(_ prompt: [Int], _ pictures: PromptPictures? = nil) -> Int {
        states.reachable(history.common(prompt, pictures))
    }

    // MARK: steps

    /// Append tokens in chunks; gives logits [1,V] of the last, or of all [n,V]. Throws `context` before any work, and
    /// `CancellationError` between two chunks where the task is cancelled. The tensor is valid until the next step.
    ///
    /// `pictures`: those of the prompt of which these are the tokens from `numTokens` on, seen.
    func prefill(_ ids: [Int], allLogits: Bool = false, pictures: PromptPictures? = nil) throws -> Tensor {
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
            let logits = try step(chunk, logitRows: wanted, pictures: pictures)
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
    ///
    /// The last `numDrafts` tokens are drafts: then all rows are asked for, and `keep` must follow. `pictures` as in `prefill`.
    func step(_ ids: [Int], logitRows: [Int], numDrafts: Int = 0, pictures: PromptPictures? = nil) throws -> Tensor {
        let rows = ids.count
        if let wrong = ids.first(where: { $0 < 0 || $0 >= model.vocabSize }) {
            throw LesonnxError.input("token id \(wrong) is outside 0..\(model.vocabSize - 1)")
        }
        try reserve(numTokens + rows)
        let buffers = buffers(for: rows)
        let places = history.next(rows, of: pictures)
        _ = buffers.inputIds[Int64.self].update(fromContentsOf: ids.map(Int64.init))
        _ = buffers.positionIds[Int64.self].update(fromContentsOf: places.joined().map(Int64.init))
        states.begin(rows: rows)
        try loader.beginStep(rows: rows, numDrafts: numDrafts)
        // Of steps of one row the governor knows which side is faster, and steps with drafts are not far from them; a prefill has
        // too much to read not to look ahead.
        let isGoverned = rows == 1 && governor != nil
        let isWanted = isGoverned ? governor?.wants() : numDrafts > 0 ? governor?.isOn : nil
        let looksAhead = loader.usesLookahead && isWanted ?? true
        let stepBegan = secondsNow()
        var denseSeconds = 0.0
        var began = stepBegan
        try run(embed, place: nil, buffers)
        try pictures?.write(to: buffers.hidden, from: numTokens)
        // Twins do not give what drafters read, and what verifies drafts should round as what follows them.
        let width = layerReader == nil && numDrafts == 0 ? twins?.forStep(rows: rows, states) : nil
        try width?.begin(buffers.positionIds, states.totalSequenceLength)
        for (place, part) in segments.enumerated() {
            try runSegment(part, place: place, buffers, width)
            let work = try work(place, buffers)
            denseSeconds += secondsNow() - began
            let prediction = looksAhead ? try prediction(after: place, buffers) : nil
            try loader.runLayer(place, work, prediction) {
                if let mixer = mixers[place] {
                    try run(mixer, place: place, buffers)
                }
            }
            began = secondsNow()
        }
        let logits = try numDrafts > 0 ? runDraftHead(buffers) : runHead(logitRows, buffers, width)
        let ended = secondsNow()
        loader.note(denseSeconds: denseSeconds + ended - began)
        if isGoverned {
            governor?.took(seconds: ended - stepBegan)
        }
        let position = numTokens
        states.commit(rows: rows)
        stepRows = rows
        history.append(ids, at: places, of: pictures)
        if let layerReader {
            try layerReader.observe(position: position, buffers.gather(layerReader.layerIdxs))
        }
        return logits
    }

    /// Make room for that many tokens in all.
    private func reserve(_ total: Int) throws {
        if total > states.capacityTokens {
            // The experts give way before the caches grow: the budget holds at every moment.
            try shareMemory(capacityTokens: states.capacity(for: total))
            buffers.removeAll()
            try states.reserve(total)
        }
    }

    /// Of the last step, which had drafts, the first rows stay: the others are gone back over and were no use.
    func keep(rows: Int) throws {
        try loader.accept(rows: Array(0..<rows))
        try rewind(to: numTokens - stepRows + rows)
    }

    /// Bind what a step of so many rows needs, so that the first one takes no longer than those after it.
    func prepareDrafts(rows: Int) throws {
        try reserve(numTokens + rows)
        let buffers = buffers(for: rows)
        _ = try binding(embed, place: nil, buffers)
        for (place, part) in segments.enumerated() {
            _ = try binding(part, place: place, buffers)
            _ = try mixers[place].map { try binding($0, place: place, buffers) }
        }
        for (place, part) in lookaheads.enumerated() {
            _ = try binding(part, place: place + 1, buffers)
        }
        _ = try draftHead(buffers)
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

    /// The head on some rows; without any it still runs where it carries states, or gives what a drafter reads.
    func runHead(_ logitRows: [Int], _ buffers: StepBuffers, _ width: TwinWidth? = nil) throws -> Tensor {
        let none = Tensor(.float32, [0, model.vocabSize])
        if logitRows.isEmpty && !headCarriesStates && layerOutputs(of: head, buffers).isEmpty {
            return none
        }
        if logitRows.count > 1 {
            let logits = Tensor(.float32, [logitRows.count, model.vocabSize])
            try bindHead(buffers, Tensor(logitRows.map(Int64.init)), logits).run()
            return logits
        }
        if let width, width.hasHead {
            let twin = try buffers.twins[head.name]
                ?? width.bindHead(head, inputs(head, place: segments.count, buffers), buffers.logits)
            buffers.twins[head.name] = twin
            try twin.run(states)
            return logitRows.isEmpty ? none : buffers.logits
        }
        let key = StepBuffers.Head(rows: 1, side: states.side)
        let binding = try buffers.heads[key] ?? bindHead(buffers, buffers.logitRows, buffers.logits)
        buffers.heads[key] = binding
        buffers.logitRows[Int64.self][0] = Int64(logitRows.first ?? 0)
        try binding.run()
        return logitRows.isEmpty ? none : buffers.logits
    }

    /// The head on every row of a step with drafts.
    private func runDraftHead(_ buffers: StepBuffers) throws -> Tensor {
        let (binding, logits) = try draftHead(buffers)
        try binding.run()
        return logits
    }

    // MARK: bindings

    /// The tensors of this width. Widths of drafts share the memory of the widest; of others, only the last is kept.
    func buffers(for rows: Int) -> StepBuffers {
        if let known = buffers[rows] {
            return known
        }
        let widest = BundleManifest.rewindableTokens
        let made: StepBuffers
        if rows > 1 && rows < widest {
            made = StepBuffers(of: buffers(for: widest), rows: rows)
        } else {
            if rows > widest {
                buffers = buffers.filter { $0.key <= widest }
            }
            made = StepBuffers(bundle.manifest, rows: rows, layerIdxs: layerReader?.layerIdxs ?? [])
        }
        buffers[rows] = made
        return made
    }

    /// A segment: itself, or its twin where the step has twins.
    func runSegment(_ part: Part, place: Int, _ buffers: StepBuffers, _ width: TwinWidth?) throws {
        guard let width else { return try run(part, place: place, buffers) }
        let twin = try buffers.twins[part.name]
            ?? width.bind(part, inputs(part, place: place, buffers), outputs(part, place: place, buffers))
        buffers.twins[part.name] = twin
        try twin.run(states)
    }

    func run(_ part: Part, place: Int?, _ buffers: StepBuffers) throws {
        try binding(part, place: place, buffers).run()
    }

    private func session(_ part: String) throws -> Session {
        guard let session = sessions[part] else { throw LesonnxError.failure("part \(part) is not loaded") }
        return session
    }

    /// A part bound to these tensors; `place` counts the segments before it (a mixer's own is behind it).
    private func binding(_ part: Part, place: Int?, _ buffers: StepBuffers) throws -> Binding {
        let key = StepBuffers.Bound(part: part.name, side: states.side)
        if let known = buffers.bindings[key] {
            return known
        }
        var outputs = outputs(part, place: place ?? 0, buffers)
        outputs.merge(layerOutputs(of: part, buffers)) { _, output in output }
        outputs.merge(states.outputs(of: part.name, rows: buffers.rows)) { _, state in state }
        let made = try Binding(session(part.name), inputs: inputs(part, place: place ?? 0, buffers), outputs: outputs)
        buffers.bindings[key] = made
        return made
    }

    /// The tensors a part writes, beside states and what drafters read.
    private func outputs(_ part: Part, place: Int, _ buffers: StepBuffers) -> [String: Tensor] {
        let out = buffers.streams[place % 2]
        let known = [
            "hidden": buffers.hidden, "scores": buffers.lookaheadScores,
            "residual_out": part.role == .mixer ? buffers.mixedResidual : out.residual, "moe_input": buffers.moeInput,
            "topk_ids": buffers.topkIds, "topk_weights_out": out.topkWeights, "shared_weights_out": out.sharedWeights,
            "router_scores": buffers.routerScores,
        ]
        return known.filter { name, _ in part.outputs.contains { $0.name == name } }
    }

    private func bindHead(_ buffers: StepBuffers, _ rows: Tensor, _ logits: Tensor) throws -> Binding {
        var inputs = inputs(head, place: segments.count, buffers)
        inputs["logit_rows"] = rows
        var outputs = states.outputs(of: head.name, rows: buffers.rows)
        outputs["logits"] = logits
        outputs.merge(layerOutputs(of: head, buffers)) { _, output in output }
        return try Binding(session(head.name), inputs: inputs, outputs: outputs)
    }

    private func draftHead(_ buffers: StepBuffers) throws -> (binding: Binding, logits: Tensor) {
        guard let logits = buffers.draftLogits else { throw LesonnxError.failure("a step of \(buffers.rows) rows has no drafts") }
        let key = StepBuffers.Head(rows: buffers.rows, side: states.side)
        let rows = (0..<buffers.rows).map(Int64.init)
        let binding = try buffers.heads[key] ?? bindHead(buffers, Tensor(rows), logits)
        buffers.heads[key] = binding
        return (binding, logits)
    }

    /// The layer outputs of a part that a drafter reads.
    private func layerOutputs(of part: Part, _ buffers: StepBuffers) -> [String: Tensor] {
        buffers.layerOutputs.filter { name, _ in part.outputs.contains { $0.name == name } }
    }

    /// The tensors a part reads; `place` counts the segments before it (a mixer's own is behind it).
    private func inputs(_ part: Part, place: Int, _ buffers: StepBuffers) -> [String: Tensor] {
        let before = buffers.streams[(place + 1) % 2]
        var residual = before.residual
        if part.role == .mixer {
            residual = buffers.streams[place % 2].residual
        } else if place > 0 && mixers[place - 1] != nil {
            residual = buffers.mixedResidual
        }
        var known = [
            "input_ids": buffers.inputIds, "hidden": buffers.hidden, "residual": residual,
            "topk_weights": before.topkWeights, "shared_weights": before.sharedWeights, "expert_out": buffers.expertOut,
            "shared_out": buffers.sharedOut, "ready": buffers.ready, "position_ids": buffers.positionIds,
            "seqlens_k": states.seqlensK, "total_sequence_length": states.totalSequenceLength,
        ]
        known.merge(states.inputs(of: part.name)) { _, state in state }
        return known.filter { name, _ in part.inputs.contains { $0.name == name } }
    }
}
