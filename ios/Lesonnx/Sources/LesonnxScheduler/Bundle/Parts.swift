// The dense parts of a bundle: the record `Part` and its pieces of the manifest.

public enum ElementType: String, Equatable, Sendable, CaseIterable {
    case float32, float16, int64, int32, bool, uint8, int8

    public var byteCount: Int {
        switch self {
        case .float32, .int32: return 4
        case .float16: return 2
        case .int64: return 8
        case .bool, .uint8, .int8: return 1
        }
    }
}

/// A dimension of a shape: a size, or a letter: T tokens of the step, R logit rows, S capacity, P tokens in a drafter's caches,
/// Y and X height and width of a picture, W columns of packed patches, I image tokens.
public enum TensorDimension: Equatable, Sendable, CustomStringConvertible {
    case size(Int)
    case symbol(String)

    public var description: String {
        switch self {
        case .size(let size): return "\(size)"
        case .symbol(let letter): return "'\(letter)'"
        }
    }

    /// nil for a letter.
    public var size: Int? {
        if case .size(let size) = self { return size }
        return nil
    }

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

public enum Role: String, Equatable, Sendable, CaseIterable {
    case embed, segment, mixer, head, lookahead, replay
    /// Those of the drafter's parts.
    case drafterContext = "drafter_context"
    case drafterBlock = "drafter_block"
    case drafterMarkov = "drafter_markov"
    /// Those of the parts that read pictures.
    case visionPrepare = "vision_prepare"
    case visionTower = "vision_tower"
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
        providers = try record.optional("providers")?.providers() ?? [:]
        try record.end()
    }
}
