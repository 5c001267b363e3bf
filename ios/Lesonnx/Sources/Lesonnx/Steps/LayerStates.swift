import LesonnxScheduler

/// All states of one sequence: attention caches that grow, and states of fixed shape. Owned by a runner, which uses it from one
/// thread at a time.
///
/// Attention rewinds by stating a smaller length; `StepStates` says how far the others go back. Lengths live in tensors that parts
/// are bound to, so a step only writes numbers.
final class LayerStates {
    let maxTokens: Int
    private(set) var numTokens = 0
    private(set) var capacityTokens = 0
    let seqlensK = Tensor(.int32, [1])
    let totalSequenceLength = Tensor(.int32, [])
    private let manifest: BundleManifest
    private let caches: [PartState]
    /// Of the caches, by the state's name.
    private var tensors: [String: Tensor] = [:]
    private var fixed: StepStates
    private let leastCapacityTokens: Int

    /// Attention caches hold `leastCapacityTokens` from the start.
    init(_ manifest: BundleManifest, leastCapacityTokens: Int = 0) {
        self.leastCapacityTokens = leastCapacityTokens
        self.manifest = manifest
        caches = manifest.states.filter(\.kind.isAttention)
        fixed = StepStates(manifest)
        maxTokens = manifest.model.maxPositionEmbeddings
    }

    /// The capacity that holds that many tokens.
    func capacity(for numTokens: Int) -> Int {
        if numTokens <= leastCapacityTokens {
            return leastCapacityTokens
        }
        let growth = BundleManifest.growthTokens
        return min((numTokens + growth - 1) / growth * growth, max(maxTokens, numTokens))
    }

    /// What the states take at a capacity.
    func bytes(at capacityTokens: Int) -> Int { manifest.stateBytes(capacityTokens: capacityTokens) }

    /// What recurrent layers take for themselves inside a step of that many rows.
    func workingBytes(rows: Int) -> Int { fixed.workingBytes(rows: rows) }

    /// Make room for that many tokens in all; tensors may move. Throws `context` beyond the model's context.
    func reserve(_ numTokens: Int) throws {
        if numTokens > maxTokens {
            throw LesonnxError.context("\(numTokens) tokens do not fit the model's context of \(maxTokens)")
        }
        if numTokens <= capacityTokens {
            return
        }
        fixed.allocate()
        let capacity = capacity(for: numTokens)
        for state in caches {
            let grown = Tensor(state.dtype, state.sizes(capacityTokens: capacity))
            if let old = tensors[state.name] {
                // [1, heads, S, size]: each head's tokens so far.
                let row = grown.shape[3] * state.dtype.byteCount
                for head in 0..<grown.shape[1] {
                    (grown.pointer + head * capacity * row).copyMemory(
                        from: old.pointer + head * capacityTokens * row, byteCount: self.numTokens * row)
                }
            }
            tensors[state.name] = grown
        }
        capacityTokens = capacity
    }

    /// Which of the buffers of fixed shape the next step reads: bindings hold for one side.
    var side: Int { fixed.side }

    /// The tensors that a part reads its states from, by its names; valid until `reserve` or a turn of the side.
    func inputs(of part: String) -> [String: Tensor] {
        var inputs = fixed.inputs(of: part)
        for state in caches where state.part == part {
            inputs[state.input] = tensors[state.name]
        }
        return inputs
    }

    /// The tensors that a part writes its states to in a step of that many rows; valid as those it reads.
    func outputs(of part: String, rows: Int) -> [String: Tensor] {
        var outputs = fixed.outputs(of: part, rows: rows)
        for state in caches where state.part == part {
            outputs[state.output] = tensors[state.name]
        }
        return outputs
    }

    /// Put a step's rows [1,heads,T,size] into attention caches, by the states' names, behind the tokens so far: twins do not.
    func write(rows: [String: Tensor]) {
        for (name, step) in rows {
            guard let cache = tensors[name] else { continue }
            let bytes = step.shape[3] * step.dtype.byteCount
            for head in 0..<step.shape[1] {
                (cache.pointer + (head * capacityTokens + numTokens) * bytes).copyMemory(
                    from: step.pointer + head * step.shape[2] * bytes, byteCount: step.shape[2] * bytes)
            }
        }
    }

    /// State the lengths of a step of that many rows; room must have been reserved.
    func begin(rows: Int) {
        let total = Int32(numTokens + rows)
        seqlensK[Int32.self][0] = total - 1
        totalSequenceLength[Int32.self][0] = total
        fixed.begin(after: numTokens)
    }

    /// The step's rows are part of the sequence.
    func commit(rows: Int) {
        numTokens += rows
        fixed.commit(numTokens)
    }

    /// The most tokens, at most `numTokens`, to which `rewind` can go back.
    func reachable(_ numTokens: Int) -> Int { fixed.reachable(numTokens) }

    /// Go back to the first `numTokens` tokens; `run` runs a replay part. Throws `input` out of reach; nothing changes then.
    ///
    /// Attention needs no more than the smaller number.
    func rewind(to numTokens: Int, _ run: RunPart) throws {
        precondition((0...self.numTokens).contains(numTokens), "cannot rewind to \(numTokens) of \(self.numTokens) tokens")
        try fixed.rewind(to: numTokens, run)
        self.numTokens = numTokens
    }
}
