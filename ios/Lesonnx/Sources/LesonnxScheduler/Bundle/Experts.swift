// How a bundle's experts are stored: the records `ExpertMatrix`, `ExpertKind` and `ExpertLayer` of the manifest.

let countLimit = 1 << 48

public enum Activation: String, Equatable, Sendable, CaseIterable {
    case swiglu, geglu, reglu
    case swigluClamped = "swiglu_clamped"
}

/// One linear map of an expert, `y = x W^T (+ bias)`, with W of shape [rows, columns] (out, in).
///
/// Quantized (bits 2, 4, 8): the weight is uint8 [rows, numBlocks, blockSize * bits / 8], low bits first, zero point
/// `2^(bits - 1)`; scales float32 [rows, numBlocks]. Float (bits 32): row-major float32 [rows, columns], `blockSize` 0, no scales.
/// A bias is float32 [rows]. Offsets count from the start of the expert.
public struct ExpertMatrix: Equatable, Sendable {
    public let rows: Int
    public let columns: Int
    public let bits: Int
    public let blockSize: Int
    public let weightOffsetBytes: Int
    public let scalesOffsetBytes: Int?
    public let biasOffsetBytes: Int?

    /// Quantization blocks along a row, the last one padded; 0 for a float matrix.
    public var numBlocks: Int { blockSize > 0 ? (columns + blockSize - 1) / blockSize : 0 }

    /// nil where it is beyond all numbers.
    var weightBytes: Int? {
        bits == 32 ? product(rows, columns, 4) : product(rows, numBlocks, blockSize * bits / 8)
    }

    /// The byte behind the last one, counted from the start of the expert; nil where that is beyond all numbers.
    var endBytes: Int? {
        guard let weight = weightBytes, let scales = product(rows, numBlocks, 4), let bias = product(rows, 4) else {
            return nil
        }
        let ends = [
            weightOffsetBytes.addingReportingOverflow(weight),
            (scalesOffsetBytes ?? 0).addingReportingOverflow(scalesOffsetBytes == nil ? 0 : scales),
            (biasOffsetBytes ?? 0).addingReportingOverflow(biasOffsetBytes == nil ? 0 : bias),
        ]
        return ends.contains(where: \.overflow) ? nil : ends.map(\.partialValue).max()
    }

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        rows = try record.required("rows").int(1...countLimit)
        columns = try record.required("columns").int(1...countLimit)
        bits = try record.required("bits").int(of: [2, 4, 8, 32])
        blockSize = try record.required("block_size").int(of: [0, 16, 32, 64, 128])
        weightOffsetBytes = try record.required("weight_offset_bytes").int(0...countLimit)
        scalesOffsetBytes = try record.nullable("scales_offset_bytes")?.int(0...countLimit)
        biasOffsetBytes = try record.nullable("bias_offset_bytes")?.int(0...countLimit)
        try record.end()
        if (bits == 32) != (blockSize == 0) || (bits == 32) != (scalesOffsetBytes == nil) {
            throw .bundle("\(field.path): block_size and scales belong to quantized matrices, and to every one of them")
        }
    }
}

/// Experts that share shape, bits and activation, so that one `stage_n.onnx` computes any of them.
public struct ExpertKind: Equatable, Sendable {
    public let name: String
    public let hiddenSize: Int
    public let intermediateSize: Int
    public let activation: Activation
    public let alpha: Double
    public let limit: Double
    public let gateProj: ExpertMatrix
    public let upProj: ExpertMatrix
    public let downProj: ExpertMatrix
    public let lengthBytes: Int
    public let stage: String?

    /// What one expert of this kind costs in the cache and on flash: its length in whole pages.
    public var costBytes: Int { (lengthBytes + pageBytes - 1) / pageBytes * pageBytes }

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        name = try record.required("name").string()
        hiddenSize = try record.required("hidden_size").int(1...countLimit)
        intermediateSize = try record.required("intermediate_size").int(1...countLimit)
        activation = try record.required("activation").choice()
        alpha = try record.optional("alpha")?.double() ?? 1.702
        limit = try record.optional("limit")?.double() ?? 7.0
        gateProj = try ExpertMatrix(record.required("gate_proj"))
        upProj = try ExpertMatrix(record.required("up_proj"))
        downProj = try ExpertMatrix(record.required("down_proj"))
        lengthBytes = try record.required("length_bytes").int(1...countLimit)
        stage = try record.nullable("stage")?.bundlePath()
        try record.end()
        for (name, matrix) in [("gate_proj", gateProj), ("up_proj", upProj), ("down_proj", downProj)] {
            let isDown = name == "down_proj"
            let rows = isDown ? hiddenSize : intermediateSize
            let columns = isDown ? intermediateSize : hiddenSize
            if matrix.rows != rows || matrix.columns != columns {
                throw .bundle(
                    "\(field.path): \(name) is [\(matrix.rows),\(matrix.columns)], expected [\(rows),\(columns)]")
            }
            if matrix.endBytes ?? Int.max > lengthBytes {
                let end = matrix.endBytes.map { "at byte \($0)" } ?? "beyond all numbers"
                throw .bundle("\(field.path): \(name) ends \(end), beyond the expert's \(lengthBytes)")
            }
        }
    }
}

/// The experts of one MoE layer: expert e lies at `e * stride` of the pack, a shared expert after the last.
public struct ExpertLayer: Equatable, Sendable {
    public let layerIdx: Int
    public let pack: String
    public let numExperts: Int
    public let numExpertsPerTok: Int
    public let kind: Int
    public let sharedKind: Int?

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        layerIdx = try record.required("layer_idx").int(0...countLimit)
        pack = try record.required("pack").bundlePath()
        numExperts = try record.required("num_experts").int(1...countLimit)
        numExpertsPerTok = try record.required("num_experts_per_tok").int(1...countLimit)
        kind = try record.required("kind").int(0...countLimit)
        sharedKind = try record.nullable("shared_kind")?.int(0...countLimit)
        try record.end()
    }
}

/// nil where the product is beyond all numbers.
func product(_ factors: Int...) -> Int? {
    var result = 1
    for factor in factors {
        let (next, overflow) = result.multipliedReportingOverflow(by: factor)
        if overflow {
            return nil
        }
        result = next
    }
    return result
}
