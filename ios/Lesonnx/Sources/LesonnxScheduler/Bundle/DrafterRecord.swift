// A block drafter that was trained for the model: the record `DrafterRecord` of the manifest (`Drafter` is what proposes tokens),
// and whether it fits its model.

public enum DrafterKind: String, Equatable, Sendable, CaseIterable {
    case dspark
}

/// A block drafter and its parts; `docs/bundle.md` says how it is run.
///
/// `targetLayerIds`: the layers whose outputs it reads, in its order; -1 is the embedding's. A slot of the block is one drafted
/// token. Its caches are the outputs of the context part, which the block part takes for all tokens.
public struct DrafterRecord: Equatable, Sendable {
    public static let roles: [Role] = [.drafterContext, .drafterBlock, .drafterMarkov]

    public let kind: DrafterKind
    public let blockSize: Int
    public let maskTokenId: Int
    public let targetLayerIds: [Int]
    public let markovRank: Int
    public let numParameters: Int
    public let parts: [Part]

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        kind = try record.required("kind").choice()
        blockSize = try record.required("block_size").int(1...1 << 8)
        maskTokenId = try record.required("mask_token_id").int(0...countLimit)
        let layers = try record.required("target_layer_ids")
        targetLayerIds = try layers.array { (idx) throws(LesonnxError) in try idx.int(-1...1 << 16) }
        markovRank = try record.required("markov_rank").int(1...1 << 31)
        numParameters = try record.required("num_parameters").int(1...countLimit)
        parts = try record.required("parts").array(Part.init)
        try record.end()
        if targetLayerIds.isEmpty {
            throw layers.wrong("at least one layer")
        }
    }

    /// The part of a role, which a manifest that was opened has.
    public func part(_ role: Role) -> Part? { parts.first { $0.role == role } }

    /// The float32 values that a token has in each cache.
    public var cacheSizes: [String: Int] {
        let outputs = part(.drafterContext)?.outputs ?? []
        return Dictionary(outputs.map { ($0.name, $0.shape.last?.size ?? 0) }, uniquingKeysWith: { first, _ in first })
    }

    /// Whether the Markov part says how likely its slot is accepted.
    public var hasConfidence: Bool { part(.drafterMarkov)?.outputs.contains { $0.name == "confidence" } ?? false }
}

/// What `targetLayerIds` calls the embedding's output.
public let embeddingIdx = -1

/// What parts call the output of a layer; that of layer -1 is the embedding's.
public func layerOutputName(_ layerIdx: Int) -> String { layerIdx == embeddingIdx ? "hidden" : "layer_output_\(layerIdx)" }

extension BundleManifest {
    /// Throws `bundle` for a drafter that no host could run as it is stated.
    func check(_ drafter: DrafterRecord) throws(LesonnxError) {
        let roles = DrafterRecord.roles.map(\.rawValue)
        if drafter.parts.map(\.role.rawValue).sorted() != roles.sorted() {
            throw .bundle("the drafter has exactly one part of each role: \(roles.joined(separator: ", "))")
        }
        if drafter.maskTokenId >= model.vocabSize {
            throw .bundle("drafter: mask_token_id is \(drafter.maskTokenId), expected less than \(model.vocabSize)")
        }
        let given = Set(parts.flatMap(\.outputs).map(\.name))
        if let layer = drafter.targetLayerIds.first(where: { !given.contains(layerOutputName($0)) }) {
            throw .bundle("drafter: target_layer_ids names layer \(layer), whose output no part gives")
        }
        if Set(drafter.targetLayerIds).count < drafter.targetLayerIds.count {
            throw .bundle("drafter: target_layer_ids names a layer twice")
        }
        for part in drafter.parts {
            let (takes, gives) = try declared(part.role, drafter)
            try check(part, "takes", part.inputs, takes)
            try check(part, "gives", part.outputs, gives)
        }
    }

    private typealias Declared = [(name: String, dtype: ElementType, shape: [TensorDimension])]

    /// What a part takes and gives. The caches are what the context part says they are.
    private func declared(_ role: Role, _ drafter: DrafterRecord) throws(LesonnxError) -> (takes: Declared, gives: Declared) {
        let (hidden, vocab) = (TensorDimension.size(model.hiddenSize), TensorDimension.size(model.vocabSize))
        let (one, block) = (TensorDimension.size(1), TensorDimension.size(drafter.blockSize))
        switch role {
        case .drafterContext:
            let width = product(model.hiddenSize, drafter.targetLayerIds.count) ?? countLimit
            return (
                [
                    ("layer_outputs", .float32, [one, .symbol("T"), .size(width)]),
                    ("position_ids", .int64, [one, .symbol("T")]),
                ],
                try caches(drafter, "T")
            )
        case .drafterBlock:
            return (
                try caches(drafter, "P") + [
                    ("input_ids", .int64, [one, block]), ("position_ids", .int64, [one, block]),
                    ("logit_rows", .int64, [.symbol("R")]),
                ],
                [("base_logits", .float32, [.symbol("R"), vocab]), ("slot_hidden", .float32, [.symbol("R"), hidden])]
            )
        default:
            let confidence: Declared = drafter.hasConfidence ? [("confidence", .float32, [one])] : []
            return (
                [
                    ("base_logits", .float32, [one, vocab]), ("slot_hidden", .float32, [one, hidden]),
                    ("token_id", .int64, [one]),
                ],
                [("logits", .float32, [one, vocab])] + confidence
            )
        }
    }

    private func caches(_ drafter: DrafterRecord, _ tokens: String) throws(LesonnxError) -> Declared {
        var caches: Declared = []
        for value in drafter.part(.drafterContext)?.outputs ?? [] {
            guard let size = value.shape.last?.size, size > 0, size < PartState.sizeLimit else {
                throw .bundle("drafter: shape \(value.shape) of cache '\(value.name)' is not [1, 'T', size]")
            }
            caches.append((value.name, .float32, [.size(1), .symbol(tokens), .size(size)]))
        }
        return caches
    }

    private func check(_ part: Part, _ verb: String, _ values: [Value], _ expected: Declared) throws(LesonnxError) {
        for (name, dtype, shape) in expected {
            guard let found = values.first(where: { $0.name == name }) else {
                throw .bundle("drafter: part '\(part.name)' \(verb) no '\(name)'")
            }
            if found.dtype != dtype || found.shape != shape {
                throw .bundle(
                    "drafter: '\(name)' of part '\(part.name)' is \(found.dtype.rawValue) \(found.shape), expected "
                        + "\(dtype.rawValue) \(shape)")
            }
        }
        let names = Set(expected.map(\.name))
        if let surplus = values.map(\.name).filter({ !names.contains($0) }).sorted().first {
            throw .bundle("drafter: part '\(part.name)' \(verb) '\(surplus)', which no host knows")
        }
    }

    /// What can draft without a second bundle: the bundle's own drafter, else prompt lookup.
    public var nearestDrafter: DrafterName { drafter == nil ? .ngram : .dspark }

    /// What a drafter keeps for a sequence at a capacity of its caches; 0 where there is none.
    public func drafterCacheBytes(capacityTokens: Int) -> Int {
        let values = drafter?.cacheSizes.values.reduce(0, +) ?? 0
        return values * capacityTokens * ElementType.float32.byteCount
    }
}
