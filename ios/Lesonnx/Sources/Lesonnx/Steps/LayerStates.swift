import LesonnxScheduler

/// All states of one sequence: attention caches that grow, rewound by stating a smaller length. Owned by a runner, which uses it
/// from one thread at a time.
///
/// Lengths live in tensors that parts are bound to, so a step only writes numbers.
final class LayerStates {
    /// Attention caches grow by this many tokens at a time.
    static let growthTokens = 512

    let maxTokens: Int
    private(set) var numTokens = 0
    private(set) var capacityTokens = 0
    /// By the state's name.
    private(set) var tensors: [String: Tensor] = [:]
    let seqlensK = Tensor(.int32, [1])
    let totalSequenceLength = Tensor(.int32, [])
    private let states: [PartState]

    /// Throws `bundle` for a state that is not an attention cache.
    init(_ manifest: BundleManifest) throws {
        states = manifest.states
        maxTokens = manifest.model.maxPositionEmbeddings
        if let other = states.first(where: { !$0.kind.isAttention }) {
            throw LesonnxError.bundle(
                "state '\(other.name)' is of kind \(other.kind.rawValue), which this lesonnx does not run")
        }
    }

    /// The capacity that holds that many tokens.
    func capacity(for numTokens: Int) -> Int {
        let steps = (numTokens + Self.growthTokens - 1) / Self.growthTokens
        return min(steps * Self.growthTokens, max(maxTokens, numTokens))
    }

    /// What the states take at a capacity.
    func bytes(at capacityTokens: Int) -> Int {
        states.reduce(0) { $0 + shape($1, capacityTokens).reduce($1.dtype.byteCount, *) }
    }

    private func shape(_ state: PartState, _ capacityTokens: Int) -> [Int] {
        state.shape.map { dimension in
            if case .size(let size) = dimension { return size }
            return capacityTokens
        }
    }

    /// Make room for that many tokens in all; tensors may move. Throws `context` beyond the model's context.
    func reserve(_ numTokens: Int) throws {
        if numTokens > maxTokens {
            throw LesonnxError.context("\(numTokens) tokens do not fit the model's context of \(maxTokens)")
        }
        if numTokens <= capacityTokens {
            return
        }
        let capacity = capacity(for: numTokens)
        for state in states {
            let grown = Tensor(state.dtype, shape(state, capacity))
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

    /// State the lengths of a step of that many rows; room must have been reserved.
    func begin(rows: Int) {
        let total = Int32(numTokens + rows)
        seqlensK[Int32.self][0] = total - 1
        totalSequenceLength[Int32.self][0] = total
    }

    /// The step's rows are part of the sequence.
    func commit(rows: Int) { numTokens += rows }

    /// Go back to the first `numTokens` tokens: attention needs no more than the smaller number.
    func rewind(to numTokens: Int) {
        precondition((0...self.numTokens).contains(numTokens), "cannot rewind to \(numTokens) of \(self.numTokens) tokens")
        self.numTokens = numTokens
    }
}
