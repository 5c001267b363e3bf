// What the dense parts of a bundle carry from step to step: the records `PartState` (`State` is SwiftUI's) and `Replay` of the
// manifest, and what they take.

public enum StateKind: String, Equatable, Sendable, CaseIterable {
    case attentionKey = "attention_key"
    case attentionValue = "attention_value"
    case convolution, recurrent

    public var isAttention: Bool { self == .attentionKey || self == .attentionValue }
}

/// How a state of fixed shape goes back to a token inside the last step.
///
/// `part`, of role `replay`, takes `past` (the state before the step) and some of the step's rows, and gives `present`, the state
/// after them. `rows` names, for each of its other inputs, the output [1, T, n] of the state's own part that holds a step's rows.
public struct Replay: Equatable, Sendable {
    public let part: String
    public let rows: [String: String]

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        part = try record.required("part").string()
        let rows = try record.required("rows")
        self.rows = try rows.dictionary { (field) throws(LesonnxError) in try field.string() }
        try record.end()
        if self.rows.isEmpty {
            throw rows.wrong("at least one row")
        }
    }
}

/// A tensor that a part carries from step to step: `input` and `output` of `part`, zero at the start.
///
/// Attention states are [1, kv heads, S, head size]; past and present are one buffer of the host's, of any capacity S that holds
/// the tokens so far and those of the step. Convolution and recurrent states have a fixed shape, past and present are two buffers,
/// and `replay` says how to go back into a step.
public struct PartState: Equatable, Sendable {
    /// No dimension of a state, nor of its rows, is as large.
    static let sizeLimit = 1 << 20

    public let name: String
    public let kind: StateKind
    public let layerIdx: Int
    public let part: String
    public let input: String
    public let output: String
    public let dtype: ElementType
    public let shape: [TensorDimension]
    /// nil for attention states, and only for them.
    public let replay: Replay?

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        name = try record.required("name").string()
        kind = try record.required("kind").choice()
        layerIdx = try record.required("layer_idx").int(0...countLimit)
        part = try record.required("part").string()
        input = try record.required("input").string()
        output = try record.required("output").string()
        dtype = try record.required("dtype").choice()
        shape = try record.required("shape").array(TensorDimension.init)
        if let field = record.nullable("replay") {
            replay = try Replay(field)
        } else {
            replay = nil
        }
        try record.end()
        let sizes = shape.compactMap(\.size)
        let isBounded = sizes.allSatisfy { $0 > 0 && $0 < Self.sizeLimit }
        if kind.isAttention {
            if shape.count != 4 || shape[2] != .symbol("S") || sizes.count != 3 || !isBounded {
                throw .bundle("\(field.path): shape \(shape) of state '\(name)' is not [1, heads, 'S', size]")
            }
        } else if sizes.isEmpty || sizes.count != shape.count || !isBounded {
            throw .bundle("\(field.path): shape \(shape) of state '\(name)' is not fixed")
        }
        if kind.isAttention != (replay == nil) {
            throw .bundle(
                "\(field.path): state '\(name)' of kind \(kind.rawValue): replay belongs to states of fixed shape")
        }
    }

    /// The shape at a capacity in tokens, which a state of fixed shape does not have.
    public func sizes(capacityTokens: Int) -> [Int] { shape.map { $0.size ?? capacityTokens } }
}

extension BundleManifest {
    /// Attention caches grow by this many tokens at a time.
    public static let growthTokens = 512
    /// Rows are kept of steps of at most this many tokens: enough to verify drafts, and a prefill's would take too much.
    public static let rewindableTokens = 16

    /// The states of fixed shape.
    public var fixedStates: [PartState] { states.filter { $0.replay != nil } }

    /// The values of a token in each row that states of fixed shape are replayed from, by part and output.
    public var rowSizes: [String: [String: Int]] {
        var sizes: [String: [String: Int]] = [:]
        for state in fixedStates {
            let outputs = parts.first { $0.name == state.part }?.outputs ?? []
            for value in outputs where state.replay?.rows.values.contains(value.name) == true {
                sizes[state.part, default: [:]][value.name] = value.shape.last?.size
            }
        }
        return sizes
    }

    /// What states of fixed shape take, whatever the context: two buffers each, and the rows that are kept of a step.
    public var fixedStateBytes: Int {
        let values = fixedStates.reduce(0) { $0 + $1.sizes(capacityTokens: 0).reduce(1, *) }
        let rows = rowSizes.values.reduce(0) { $0 + $1.values.reduce(0, +) }
        return (2 * values + Self.rewindableTokens * rows) * ElementType.float32.byteCount
    }

    /// What all states take at a capacity of the attention caches.
    public func stateBytes(capacityTokens: Int) -> Int {
        states.filter(\.kind.isAttention).reduce(fixedStateBytes) { total, state in
            total + state.sizes(capacityTokens: capacityTokens).reduce(state.dtype.byteCount, *)
        }
    }

    /// What the states take when they hold that many tokens.
    public func stateBytes(contextTokens: Int) -> Int {
        stateBytes(capacityTokens: (contextTokens + Self.growthTokens - 1) / Self.growthTokens * Self.growthTokens)
    }
}
