import LesonnxScheduler

/// The DSpark drafter of a bundle: a block of tokens in one pass over what the target's layers gave, then slot by slot.
///
/// It keeps keys and values of every token that the target ran, projected from the outputs of some of its layers; the block's own
/// are dropped after each draft. Owns three sessions, its caches and the rows that are not projected yet. It knows nothing of
/// verification or price; `docs/bundle.md` has its parts.
final class DSparkDrafter: Drafter, LayerReader {
    /// Rows of layer outputs are projected when a draft needs them, or when there are so many: few runs of many rows cost less than
    /// many of one, and what is kept unprojected stays small.
    static let pendingTokens = 64

    let name = DrafterName.dspark
    let isFree = false
    let maxTokens: Int
    let layerIdxs: [Int]
    private let model: ModelFacts
    private let context: Session
    private let sizes: [String: Int]
    private let pending: Tensor
    private var block: DSparkBlock?
    /// By name, [1,capacity,size].
    private var caches: [String: Tensor] = [:]
    private var capacityTokens = 0
    /// Tokens whose keys and values are in the caches, and those behind them whose rows are kept.
    private var numProjected = 0
    private var numPending = 0

    /// Throws `input` where the bundle has no such drafter, `bundle` where ONNX Runtime does not take its parts.
    init(_ bundle: ModelBundle, _ environment: OrtEnvironment) throws {
        guard let record = bundle.manifest.drafter else {
            throw LesonnxError.input(
                "\(bundle.directory.path(percentEncoded: false)): this bundle has no dspark drafter; export with --drafter CHECKPOINT")
        }
        func session(_ role: Role) throws -> Session {
            guard let part = record.part(role) else { throw LesonnxError.bundle("the drafter has no \(role.rawValue)") }
            return try environment.session(bundle.file(part.path).path(percentEncoded: false), .dense)
        }
        model = bundle.manifest.model
        maxTokens = min(record.blockSize, maxDraftTokens)
        layerIdxs = record.targetLayerIds
        sizes = record.cacheSizes
        context = try session(.drafterContext)
        pending = Tensor(.float32, [Self.pendingTokens, layerIdxs.count * model.hiddenSize])
        block = DSparkBlock(record, model, try session(.drafterBlock), try session(.drafterMarkov))
        try warmUp()
    }

    func close() {
        block = nil
        caches.removeAll()
        (capacityTokens, numProjected, numPending) = (0, 0, 0)
    }

    // MARK: context

    /// Tokens of the sequence, from its beginning, whose layer outputs it has.
    var numTokens: Int { numProjected + numPending }

    /// Outputs of the tokens from `position` on; what it had from there on is forgotten. Throws `failure` where tokens before
    /// `position` are missing.
    func observe(position: Int, _ layerOutputs: Tensor) throws {
        if position > numTokens {
            throw LesonnxError.failure("the drafter has seen \(numTokens) tokens, and is told of token \(position)")
        }
        rewind(to: position)
        let count = layerOutputs.shape[0]
        if numPending + count > Self.pendingTokens {
            try flush()
        }
        if count > Self.pendingTokens {
            try project(layerOutputs)
            return
        }
        let target = pending.slice(numPending..<numPending + count, axis: 0)
        target.pointer.copyMemory(from: layerOutputs.pointer, byteCount: target.byteCount)
        numPending += count
    }

    /// Forget what comes behind the first `numTokens` tokens: two numbers, nothing is moved.
    func rewind(to numTokens: Int) {
        numProjected = min(numProjected, numTokens)
        numPending = min(numPending, numTokens - numProjected)
    }

    /// Project the rows that are pending.
    private func flush() throws {
        if numPending > 0 {
            let rows = pending.first(numPending, axis: 0)
            numPending = 0
            try project(rows)
        }
    }

    /// Append rows [T,n*H] to the caches.
    private func project(_ rows: Tensor) throws {
        let (first, total) = (numProjected, numProjected + rows.shape[0])
        reserve(total)
        let positions = Tensor((first..<total).map(Int64.init)).reshaped([1, rows.shape[0]])
        let inputs = ["layer_outputs": rows.reshaped([1] + rows.shape), "position_ids": positions]
        try Binding(context, inputs: inputs, outputs: caches.mapValues { $0.slice(first..<total, axis: 1) }).run()
        numProjected = total
    }

    /// Room for that many tokens: caches grow as attention's do.
    private func reserve(_ numTokens: Int) {
        if numTokens <= capacityTokens {
            return
        }
        capacityTokens = capacity(for: numTokens)
        for (name, size) in sizes {
            let grown = Tensor(.float32, [1, capacityTokens, size])
            if let old = caches[name]?.first(numProjected, axis: 1) {
                grown.pointer.copyMemory(from: old.pointer, byteCount: old.byteCount)
            }
            caches[name] = grown
        }
    }

    private func capacity(for numTokens: Int) -> Int {
        let growth = BundleManifest.growthTokens
        return min((numTokens + growth - 1) / growth * growth, max(model.maxPositionEmbeddings, numTokens))
    }

    func bytes(at numTokens: Int) -> Int {
        capacity(for: numTokens) * sizes.values.reduce(0, +) * ElementType.float32.byteCount + pending.byteCount
    }

    /// Run every part once on nothing: so the weights that it maps count as this process's before memory is shared out, and the first
    /// draft takes no longer than others.
    private func warmUp() throws {
        try observe(position: 0, Tensor(.float32, [1, pending.shape[1]]))
        try flush()
        try block?.run(anchor: 0, start: 1, count: maxTokens, seen(1))
        for slot in 0..<maxTokens {
            _ = try block?.slot(slot, after: 0)
        }
        rewind(to: 0)
    }

    // MARK: drafting

    /// Up to `maxTokens` tokens after `tokenIds`, and how likely each is right if those before it are. Throws `failure` where it has
    /// not seen what the target gave for all but the last of them.
    func propose(after tokenIds: [Int], maxTokens: Int, _ sampler: inout DraftSampler) throws -> Draft {
        let start = tokenIds.count - 1
        guard start <= numTokens, let block else {
            throw LesonnxError.failure("the drafter has seen \(numTokens) tokens, expected \(start)")
        }
        rewind(to: start)
        try flush()
        let count = min(maxTokens, self.maxTokens)
        var before = tokenIds[start]
        try block.run(anchor: before, start: start, count: count, seen(start))
        var draft = Draft(probabilities: sampler.draws ? [] : nil, confidence: block.hasConfidence ? [] : nil)
        for slot in 0..<count {
            let (logits, confidence) = try block.slot(slot, after: before)
            let chosen = try sampler.choose(UnsafeBufferPointer(logits[Float.self]))
            before = chosen.id
            draft.tokenIds.append(before)
            if let distribution = chosen.distribution {
                draft.probabilities?.append(distribution)
            }
            draft.confidence?.append(fixedConfidence(confidence))
        }
        return draft
    }

    /// The caches [1,numTokens,size], by name; they hold until it observes more.
    private func seen(_ numTokens: Int) -> [String: Tensor] { caches.mapValues { $0.first(numTokens, axis: 1) } }
}
