// The bundle's contract: what `manifest.json` says. It knows nothing of files beyond their relative names, nor of ONNX Runtime.
// `docs/bundle.md` says what each field means, `lesonnx/manifest.py` is the reference of what is refused.

/// What a host must know of the model; names as Hugging Face spells them.
public struct ModelFacts: Equatable, Sendable {
    public let modelType: String
    public let hiddenSize: Int
    public let numHiddenLayers: Int
    public let vocabSize: Int
    public let numExperts: Int
    public let numExpertsPerTok: Int
    public let moeIntermediateSize: Int
    public let maxPositionEmbeddings: Int
    public let numParameters: Int
    public let numActiveParameters: Int
    public let eosTokenIds: [Int]
    public let bosTokenId: Int?
    public let padTokenId: Int?

    init(_ field: Field) throws(LesonnxError) {
        let sizes = 1...(1 << 31)
        var record = try Record(field)
        modelType = try record.required("model_type").string()
        hiddenSize = try record.required("hidden_size").int(sizes)
        numHiddenLayers = try record.required("num_hidden_layers").int(sizes)
        vocabSize = try record.required("vocab_size").int(sizes)
        numExperts = try record.required("num_experts").int(sizes)
        numExpertsPerTok = try record.required("num_experts_per_tok").int(sizes)
        moeIntermediateSize = try record.required("moe_intermediate_size").int(sizes)
        maxPositionEmbeddings = try record.required("max_position_embeddings").int(sizes)
        numParameters = try record.required("num_parameters").int(1...countLimit)
        numActiveParameters = try record.required("num_active_parameters").int(1...countLimit)
        eosTokenIds = try record.optional("eos_token_ids")?.array { (id) throws(LesonnxError) in try id.int(0...countLimit) } ?? []
        bosTokenId = try record.nullable("bos_token_id")?.int(0...countLimit)
        padTokenId = try record.nullable("pad_token_id")?.int(0...countLimit)
        try record.end()
        if numExpertsPerTok > numExperts {
            throw .bundle("\(field.path): \(numExpertsPerTok) experts a token of \(numExperts)")
        }
    }
}

/// What rounding the experts of a MoE layer is expected to cost: nats of KL a token.
public struct CalibratedLayer: Equatable, Sendable {
    public let layerIdx: Int
    public let expectedLoss: Double

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        layerIdx = try record.required("layer_idx").int(0...countLimit)
        let loss = try record.required("expected_loss")
        expectedLoss = try loss.double()
        try record.end()
        if expectedLoss < 0 { throw loss.wrong("0 or more") }
    }
}

/// How experts were quantized for what they do on a text: its digest (nil where random tokens had to do) and the tokens of it that
/// were run. With a `targetSize`, bits and blocks were chosen layer by layer for experts of at most that share of `baselineBytes`.
public struct Calibration: Equatable, Sendable {
    public let textSha256: String?
    public let numTokens: Int
    public let targetSize: Double?
    public let baselineBytes: Int
    public let layers: [CalibratedLayer]

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        let digest = try record.required("text_sha256")
        textSha256 = digest.value == .null ? nil : try digest.string()
        numTokens = try record.required("num_tokens").int(1...countLimit)
        let share = record.nullable("target_size")
        targetSize = try share?.double()
        baselineBytes = try record.required("baseline_bytes").int(1...countLimit)
        layers = try record.required("layers").array(CalibratedLayer.init)
        try record.end()
        let isHex = textSha256?.utf8.allSatisfy { (0x30...0x39).contains($0) || (0x61...0x66).contains($0) } ?? true
        if !isHex || textSha256.map({ $0.utf8.count != 64 }) ?? false { throw digest.wrong("a SHA-256 in lower case") }
        if let share, let targetSize, targetSize <= 0 { throw share.wrong("more than 0") }
    }
}

/// How the weights are stored: bits and block sizes of experts and dense parts. Experts may differ from `expertBits` and
/// `blockSize`, layer by layer and matrix by matrix: their kinds say how (`BundleManifest.expertBits`).
public struct Quantization: Equatable, Sendable {
    public let expertBits: Int
    public let denseBits: Int
    public let kvBits: Int
    public let blockSize: Int
    public let calibration: Calibration?

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        expertBits = try record.required("expert_bits").int(of: [2, 4, 8, 32])
        denseBits = try record.required("dense_bits").int(of: [4, 8, 32])
        kvBits = try record.optional("kv_bits")?.int(of: [8, 16, 32]) ?? 32
        blockSize = try record.required("block_size").int(of: [0, 16, 32, 64, 128])
        if let found = record.nullable("calibration") {
            calibration = try Calibration(found)
        } else {
            calibration = nil
        }
        try record.end()
    }
}

/// Where the tokenizer lies; `onnx` is nil where onnxruntime-extensions cannot express it.
public struct TokenizerFiles: Equatable, Sendable {
    public let jsonPath: String?
    public let onnx: String?
    public let config: String?
    public let chatTemplate: String?
    /// nil where there is no chat template, or one that plain text cannot stand for: such a bundle completes and does not chat.
    public let chatFormat: ChatFormat?

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        jsonPath = try record.nullable("json_path")?.bundlePath()
        onnx = try record.nullable("onnx")?.bundlePath()
        config = try record.nullable("config")?.bundlePath()
        chatTemplate = try record.nullable("chat_template")?.bundlePath()
        if let format = record.nullable("chat_format") {
            chatFormat = try ChatFormat(format)
        } else {
            chatFormat = nil
        }
        try record.end()
    }
}

/// The whole of `manifest.json`.
public struct BundleManifest: Equatable, Sendable {
    public static let formatVersion = 1

    public let producer: String
    public let onnxruntimeAtLeast: String
    public let model: ModelFacts
    public let quantization: Quantization
    public let prefillChunkTokens: Int
    public let parts: [Part]
    public let states: [PartState]
    public let expertKinds: [ExpertKind]
    public let expertLayers: [ExpertLayer]
    public let tokenizer: TokenizerFiles?
    /// nil where none was trained for the model, or exported with it.
    public let drafter: DrafterRecord?
    /// nil where no part comes once more for an accelerator.
    public let twins: TwinsRecord?
    /// nil where the model, or the bundle, has no eyes.
    public let vision: VisionRecord?
    public let skippedTensors: [String: String]

    /// The manifest in a JSON text (UTF-8). Throws `bundle` in one line that names `source` and the field.
    public init(parsing text: some Collection<UInt8>, source: String = "manifest.json") throws(LesonnxError) {
        do {
            try self.init(JSON(parsing: text))
        } catch {
            throw .bundle("\(source): \(error)")
        }
    }

    private init(_ document: JSON) throws(LesonnxError) {
        if let version = document["format_version"]?.int, version != Self.formatVersion {
            throw .bundle("format_version is \(version), this lesonnx reads \(Self.formatVersion); export again")
        }
        var record = try Record(Field(path: "", value: document))
        _ = try record.optional("format_version")?.int(of: [Self.formatVersion])
        producer = try record.required("producer").string()
        let needed = try record.required("onnxruntime_at_least")
        onnxruntimeAtLeast = try needed.string()
        if versionNumbers(onnxruntimeAtLeast) == nil {
            throw needed.wrong("a version such as 1.24")
        }
        model = try ModelFacts(record.required("model"))
        quantization = try Quantization(record.required("quantization"))
        prefillChunkTokens = try record.optional("prefill_chunk_tokens")?.int(1...countLimit) ?? 512
        parts = try record.required("parts").array(Part.init)
        states = try record.required("states").array(PartState.init)
        expertKinds = try record.required("expert_kinds").array(ExpertKind.init)
        expertLayers = try record.required("expert_layers").array(ExpertLayer.init)
        if let files = record.nullable("tokenizer") {
            tokenizer = try TokenizerFiles(files)
        } else {
            tokenizer = nil
        }
        if let field = record.nullable("drafter") {
            drafter = try DrafterRecord(field)
        } else {
            drafter = nil
        }
        if let field = record.nullable("twins") {
            twins = try TwinsRecord(field)
        } else {
            twins = nil
        }
        if let field = record.nullable("vision") {
            vision = try VisionRecord(field)
        } else {
            vision = nil
        }
        skippedTensors =
            try record.optional("skipped_tensors")?.dictionary { (why) throws(LesonnxError) in try why.string() } ?? [:]
        try record.end()
        try checkParts()
        try checkStates()
        try checkLayers()
        if let drafter {
            try check(drafter)
        }
        if let twins {
            try check(twins)
        }
        if let vision {
            try check(vision)
        }
    }

    private func checkParts() throws(LesonnxError) {
        let names = Set(parts.map(\.name))
        if names.count < parts.count {
            throw .bundle("parts: two parts have one name")
        }
        for role in [Role.embed, .head] where parts.filter({ $0.role == role }).map(\.name) != [role.rawValue] {
            throw .bundle("parts: a bundle has exactly one \(role.rawValue) part, of that name")
        }
        if parts.contains(where: { DrafterRecord.roles.contains($0.role) }) {
            throw .bundle("the drafter's parts belong into drafter.parts")
        }
        if parts.contains(where: { VisionRecord.roles.contains($0.role) }) {
            throw .bundle("vision's parts belong into vision.parts")
        }
        let positions: [TensorDimension] = (positionRows == 1 ? [] : [.size(positionRows)]) + [.size(1), .symbol("T")]
        for part in parts {
            if let found = part.inputs.first(where: { $0.name == "position_ids" && $0.shape != positions }) {
                throw .bundle("parts: part '\(part.name)' takes position_ids \(found.shape), expected \(positions)")
            }
        }
        if !(1...(1 << 31)).contains(residualSize) {
            throw .bundle("parts: residual_out has \(residualSize) values a token, expected 1 to \(1 << 31)")
        }
    }

    private func checkStates() throws(LesonnxError) {
        var bytes = 0
        for state in states {
            guard let owner = parts.first(where: { $0.name == state.part }) else {
                throw .bundle("states: state '\(state.name)' names part '\(state.part)', which is not there")
            }
            if let replay = state.replay {
                try check(replay, of: state, owner)
            }
            // A cache at its largest, or two buffers: what is counted later on stays a number.
            var own: Int? = 8 * (state.kind.isAttention ? model.maxPositionEmbeddings + Self.growthTokens : 1)
            for size in state.shape.compactMap(\.size) {
                own = own.flatMap { product($0, size) }
            }
            bytes = min(own ?? countLimit, countLimit) + bytes
            if bytes >= countLimit {
                throw .bundle("states: at the model's whole context they would have more than \(countLimit) bytes")
            }
        }
    }

    /// Whether a state's rows are what its replay part takes.
    private func check(_ replay: Replay, of state: PartState, _ owner: Part) throws(LesonnxError) {
        let place = "states: state '\(state.name)'"
        guard let part = parts.first(where: { $0.name == replay.part && $0.role == .replay }) else {
            throw .bundle("\(place) names '\(replay.part)', which is no part of role replay")
        }
        let past = part.inputs.first { $0.name == "past" }
        let present = part.outputs.first { $0.name == "present" }
        if past?.shape != state.shape || present?.shape != state.shape {
            throw .bundle("states: part '\(part.name)' does not take past and give present \(state.shape)")
        }
        let taken = part.inputs.filter { $0.name != "past" }
        if Set(taken.map(\.name)) != Set(replay.rows.keys) {
            let names = taken.map(\.name).sorted().joined(separator: ", ")
            throw .bundle("\(place): part '\(part.name)' takes the rows \(names)")
        }
        for value in taken {
            let name = replay.rows[value.name] ?? ""
            guard let row = owner.outputs.first(where: { $0.name == name }), row.shape == value.shape,
                row.dtype == value.dtype
            else { throw .bundle("\(place): rows '\(name)' are not what '\(part.name)' takes") }
            let isSized = row.shape.last?.size.map { $0 > 0 && $0 < PartState.sizeLimit } ?? false
            if row.shape.count != 3 || Array(row.shape.prefix(2)) != [.size(1), .symbol("T")] || !isSized {
                throw .bundle("states: shape \(row.shape) of the rows '\(name)' is not [1, 'T', size]")
            }
        }
    }

    private func checkLayers() throws(LesonnxError) {
        if expertLayers.isEmpty {
            throw .bundle("expert_layers: expected at least one layer, found none")
        }
        let early = parts.filter { $0.role == .mixer }.map(\.layerIdx)
        if !early.allSatisfy({ idx in expertLayers.contains { $0.layerIdx == idx } }) {
            throw .bundle("a mixer part belongs to no MoE layer")
        }
        let ahead = Set(parts.filter { $0.role == .lookahead }.map(\.layerIdx))
        if let layer = expertLayers.dropFirst().first(where: { !ahead.contains($0.layerIdx) }) {
            throw .bundle("layer \(layer.layerIdx) has no lookahead part")
        }
        if parts.filter({ $0.role == .segment }).map(\.layerIdx) != expertLayers.map(\.layerIdx) {
            throw .bundle("every MoE layer needs its segment, in the order of the layers")
        }
        if let layers = quantization.calibration?.layers, layers.map(\.layerIdx) != expertLayers.map(\.layerIdx) {
            throw .bundle("quantization.calibration.layers: not the layers of expert_layers")
        }
        for (place, layer) in expertLayers.enumerated() {
            for (key, found, expected) in [
                ("num_experts", layer.numExperts, model.numExperts),
                ("num_experts_per_tok", layer.numExpertsPerTok, model.numExpertsPerTok),
            ] where found != expected {
                throw .bundle("expert_layers.\(place): \(key) is \(found), the model's is \(expected)")
            }
            for kind in [layer.kind, layer.sharedKind].compactMap({ $0 }) where kind >= expertKinds.count {
                throw .bundle("layer \(layer.layerIdx) names expert kind \(kind) of \(expertKinds.count)")
            }
            let experts = product(layer.numExperts + 1, expertKinds[layer.kind].costBytes)
            if experts ?? Int.max > countLimit {
                throw .bundle("expert_layers.\(place): its pack would have more than \(countLimit) bytes")
            }
        }
    }

    /// The values of a token in what segments hand on as `residual`: the hidden size, in Gemma 4 twice that.
    public var residualSize: Int {
        let outputs = parts.lazy.flatMap(\.outputs)
        return outputs.compactMap { $0.name == "residual_out" ? $0.shape.last?.size : nil }.first ?? model.hiddenSize
    }

    /// The bits that matrices of experts have, ascending: one number where all are alike.
    public var expertBits: [Int] {
        let kinds = Set(expertLayers.flatMap { [$0.kind, $0.sharedKind].compactMap { $0 } }).map { expertKinds[$0] }
        return Set(kinds.flatMap { [$0.gateProj.bits, $0.upProj.bits, $0.downProj.bits] }).sorted()
    }

    /// The part of a role (and layer); nil where there is none.
    public func part(_ role: Role, layerIdx: Int? = nil) -> Part? {
        parts.first { $0.role == role && (layerIdx == nil || $0.layerIdx == layerIdx) }
    }

    /// What the scheduler must know of the MoE layers, in their order.
    public var layerShapes: [LayerShape] {
        expertLayers.map { layer in
            LayerShape(
                numExperts: layer.numExperts, numExpertsPerTok: layer.numExpertsPerTok,
                costBytes: expertKinds[layer.kind].costBytes,
                sharedCostBytes: layer.sharedKind.map { expertKinds[$0].costBytes } ?? 0)
        }
    }
}

/// The one to three numbers of a version such as 1.24 or 1.24.2; nil where the text is none.
func versionNumbers(_ text: String) -> [Int]? {
    let pieces = text.split(separator: ".", omittingEmptySubsequences: false)
    let isVersion = (1...3).contains(pieces.count) && pieces.allSatisfy {
        (1...4).contains($0.utf8.count) && $0.utf8.allSatisfy { (0x30...0x39).contains($0) }
    }
    return isVersion ? pieces.compactMap { Int($0) } : nil
}

/// Whether a version such as 1.24.2 (what follows its numbers, `-dev` say, does not count) is at least one such as 1.24.
public func isVersion(_ version: String, atLeast least: String) -> Bool {
    let plain = version.prefix { $0.isNumber || $0 == "." }
    guard let found = versionNumbers(String(plain)), let needed = versionNumbers(least) else { return false }
    let padded = [found, needed].map { $0 + Array(repeating: 0, count: 3 - $0.count) }
    return !padded[0].lexicographicallyPrecedes(padded[1])
}
