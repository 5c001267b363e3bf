// The dense parts of a bundle and what they carry: the records `Part`, `PartState` (`State` is SwiftUI's) and their pieces of the manifest.

public enum ElementType: String, Equatable, Sendable, CaseIterable {
    case float32, float16, int64, int32, bool, uint8
}

/// A dimension of a shape: a size, or a letter: T tokens of the step, R logit rows, S capacity.
public enum TensorDimension: Equatable, Sendable {
    case size(Int)
    case symbol(String)

    init(_ field: Field) throws(LesonnxError) {
        if let size = field.value.int {
            self = .size(size)
        } else if let symbol = field.value.string {
            self = .symbol(symbol)
        } else {
            throw field.wrong("a number or a letter")
        }
    }
}

/// A tensor that a part takes or gives.
public struct Value: Equatable, Sendable {
    public let name: String
    public let dtype: ElementType
    public let shape: [TensorDimension]

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        name = try record.required("name").string()
        dtype = try record.required("dtype").choice()
        shape = try record.required("shape").array(TensorDimension.init)
        try record.end()
    }
}

/// An execution provider and its options, as ONNX Runtime names them.
public struct Provider: Equatable, Sendable {
    public let name: String
    public let options: [String: String]

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        name = try record.required("name").string()
        options = try record.optional("options")?.dictionary { (field) throws(LesonnxError) in try field.string() } ?? [:]
        try record.end()
    }
}

public enum Target: String, Equatable, Sendable, CaseIterable {
    case desktop, android, ios
}

public enum Role: String, Equatable, Sendable, CaseIterable {
    case embed, segment, head, lookahead
}

/// A dense ONNX model of the bundle.
public struct Part: Equatable, Sendable {
    public let name: String
    public let role: Role
    public let path: String
    public let layerIdx: Int?
    public let inputs: [Value]
    public let outputs: [Value]
    public let providers: [Target: [Provider]]

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        name = try record.required("name").string()
        role = try record.required("role").choice()
        path = try record.required("path").bundlePath()
        layerIdx = try record.nullable("layer_idx")?.int(0...countLimit)
        inputs = try record.required("inputs").array(Value.init)
        outputs = try record.required("outputs").array(Value.init)
        var providers: [Target: [Provider]] = [:]
        if let field = record.optional("providers") {
            for (key, list) in try field.dictionary({ (field) throws(LesonnxError) in try field.array(Provider.init) }) {
                guard let target = Target(rawValue: key) else {
                    throw field.wrong("keys among \(Target.allCases.map(\.rawValue).joined(separator: ", "))")
                }
                providers[target] = list
            }
        }
        self.providers = providers
        try record.end()
    }
}

public enum StateKind: String, Equatable, Sendable, CaseIterable {
    case attentionKey = "attention_key"
    case attentionValue = "attention_value"
    case convolution, recurrent

    public var isAttention: Bool { self == .attentionKey || self == .attentionValue }
}

/// A tensor that a part carries from step to step: `input` and `output` of `part`, zero at the start.
///
/// Attention states are [1, kv heads, S, head size]; past and present are one buffer of the host's, of any capacity S that holds
/// the tokens so far and those of the step.
public struct PartState: Equatable, Sendable {
    public let name: String
    public let kind: StateKind
    public let layerIdx: Int
    public let part: String
    public let input: String
    public let output: String
    public let dtype: ElementType
    public let shape: [TensorDimension]

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
        try record.end()
        if kind.isAttention && !isAttentionShape {
            throw .bundle("\(field.path).shape: of state '\(name)' is not [1, heads, 'S', size]")
        }
    }

    private var isAttentionShape: Bool {
        shape.count == 4 && shape[2] == .symbol("S")
            && [0, 1, 3].allSatisfy { place in
                if case .size(let size) = shape[place] { return size > 0 && size < 1 << 20 }
                return false
            }
    }
}
