import LesonnxScheduler

/// Runs a part, by its name, on tensors of these names.
typealias RunPart = (_ part: String, _ inputs: [String: Tensor], _ outputs: [String: Tensor]) throws -> Void

/// The states of fixed shape of one sequence, those of convolutions and recurrences: a step reads one buffer and writes the other.
/// Owned by `LayerStates`, which uses it from one thread at a time.
///
/// So the state before the last step is there until the next one begins, and a step that breaks off has changed nothing. To go back
/// to a token inside the last step, that state is run again on the step's first rows, which the parts give for it.
struct StepStates {
    /// The values that a recurrent layer has in memory at once, in multiples of its rows: 4.4 were measured.
    private static let workingRows = 5

    /// Which of the two buffers is the past of the next step; stays 0 where there are no such states.
    private(set) var side = 0
    /// What buffers and kept rows take.
    let byteCount: Int
    private let states: [PartState]
    private let rowSizes: [String: [String: Int]]
    /// By the state's name, two each.
    private var buffers: [String: [Tensor]] = [:]
    /// By part and output.
    private var rows: [String: [String: Tensor]] = [:]
    /// Tokens before the last step, and with it.
    private var step = (first: 0, last: 0)

    init(_ manifest: BundleManifest) {
        states = manifest.fixedStates
        rowSizes = manifest.rowSizes
        byteCount = manifest.fixedStateBytes
    }

    /// What a part takes at most inside a step of that many rows for its layers with such states.
    func workingBytes(rows: Int) -> Int {
        var values: [String: Int] = [:]
        for state in states {
            let sizes = rowSizes[state.part] ?? [:]
            values[state.part, default: 0] += state.replay?.rows.values.reduce(0) { $0 + (sizes[$1] ?? 0) } ?? 0
        }
        return Self.workingRows * (values.values.max() ?? 0) * rows * ElementType.float32.byteCount
    }

    /// Make the buffers, zeroed, where they are not there yet.
    mutating func allocate() {
        if !buffers.isEmpty { return }
        for state in states {
            let shape = state.sizes(capacityTokens: 0)
            buffers[state.name] = [Tensor(.float32, shape), Tensor(.float32, shape)]
        }
        rows = rowSizes.mapValues { sizes in
            sizes.mapValues { Tensor(.float32, [1, BundleManifest.rewindableTokens, $0]) }
        }
    }

    /// What a part reads, by its names; valid until `side` changes.
    func inputs(of part: String) -> [String: Tensor] {
        var tensors: [String: Tensor] = [:]
        for state in states where state.part == part {
            tensors[state.input] = buffers[state.name]?[side]
        }
        return tensors
    }

    /// What a part writes in a step of that many rows; valid until `side` changes.
    func outputs(of part: String, rows count: Int) -> [String: Tensor] {
        var tensors: [String: Tensor] = [:]
        for state in states where state.part == part {
            tensors[state.output] = buffers[state.name]?[1 - side]
        }
        // One row leaves nothing between the state before and after it.
        if count > 1 && count <= BundleManifest.rewindableTokens {
            for (name, tensor) in rows[part] ?? [:] {
                tensors[name] = tensor.rows(count)
            }
        }
        return tensors
    }

    /// A step begins after that many tokens: what it writes over, nobody can go back to.
    mutating func begin(after numTokens: Int) { step = (numTokens, numTokens) }

    /// The step is done, with it there are that many tokens.
    mutating func commit(_ numTokens: Int) {
        step.last = numTokens
        turn()
    }

    private mutating func turn() {
        if !states.isEmpty {
            side = 1 - side
        }
    }

    /// The most tokens, at most `numTokens`, to which a rewind can go.
    func reachable(_ numTokens: Int) -> Int {
        let keepsRows = step.last <= step.first + BundleManifest.rewindableTokens
        if states.isEmpty || numTokens == step.last || (keepsRows && numTokens >= step.first && numTokens < step.last) {
            return numTokens
        }
        return step.first <= numTokens ? step.first : 0
    }

    /// Go back to that many tokens. Throws `input` where they cannot be reached; nothing changes then.
    mutating func rewind(to numTokens: Int, _ run: RunPart) throws {
        let (first, last) = step
        if reachable(numTokens) != numTokens {
            let inside = last <= first + BundleManifest.rewindableTokens ? "\(first) to \(last)" : "\(first) or \(last)"
            throw LesonnxError.input(
                "cannot rewind to \(numTokens) tokens: the states of this model go back to \(inside) tokens, or to 0")
        }
        if states.isEmpty || numTokens == last { return }
        if numTokens == 0 {
            buffers.values.forEach { $0[side].zero() }
        } else if numTokens == first {
            // The past of the last step is that of the next one again.
            turn()
        } else {
            for state in states {
                try replay(state, rows: numTokens - first, run)
            }
        }
        step = (min(first, numTokens), numTokens)
    }

    /// The state after the first rows of the last step, from the state before it.
    private func replay(_ state: PartState, rows count: Int, _ run: RunPart) throws {
        guard let replay = state.replay, let buffers = buffers[state.name], let kept = rows[state.part] else { return }
        var inputs = replay.rows.compactMapValues { kept[$0]?.rows(count) }
        inputs["past"] = buffers[1 - side]
        try run(replay.part, inputs, ["present": buffers[side]])
    }
}
