// How pictures come in: the record `VisionRecord` of the manifest, and whether it fits its model.

public enum VisionKind: String, Equatable, Sendable, CaseIterable {
    case minicpmv
}

/// Token ids by which positions are given: image tokens, and the marks around pictures, slices and their rows.
public struct VisionTokens: Equatable, Sendable {
    public let image: Int
    public let imageStart: Int
    public let imageEnd: Int
    public let sliceStart: Int
    public let sliceEnd: Int
    public let newline: Int

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        image = try record.required("image").int(0...countLimit)
        imageStart = try record.required("image_start").int(0...countLimit)
        imageEnd = try record.required("image_end").int(0...countLimit)
        sliceStart = try record.required("slice_start").int(0...countLimit)
        sliceEnd = try record.required("slice_end").int(0...countLimit)
        newline = try record.required("newline").int(0...countLimit)
        try record.end()
    }

    var byName: [(name: String, id: Int)] {
        [
            ("image", image), ("image_start", imageStart), ("image_end", imageEnd), ("slice_start", sliceStart),
            ("slice_end", sliceEnd), ("newline", newline),
        ]
    }
}

/// The text that stands for pictures in a prompt.
///
/// A prompt has one `placeholder` a picture, see `expand`. `idStart` and `idEnd` stand around a picture's number, both nil where it
/// has none. `separator` comes between a picture and what follows it in a message of a chat; nil where there is no chat.
public struct VisionTexts: Equatable, Sendable {
    public let placeholder: String
    public let imageStart: String
    public let imageEnd: String
    public let sliceStart: String
    public let sliceEnd: String
    public let rowEnd: String
    public let idStart: String?
    public let idEnd: String?
    public let separator: String?

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        let mark = try record.required("placeholder")
        placeholder = try mark.string()
        imageStart = try record.required("image_start").string()
        imageEnd = try record.required("image_end").string()
        sliceStart = try record.required("slice_start").string()
        sliceEnd = try record.required("slice_end").string()
        rowEnd = try record.required("row_end").string()
        idStart = try record.nullable("id_start")?.string()
        idEnd = try record.nullable("id_end")?.string()
        separator = try record.nullable("separator")?.string()
        try record.end()
        if placeholder.isEmpty { throw mark.wrong("a text") }
    }
}

/// What prepares and reads pictures, and how they are cut, marked and placed; `docs/bundle.md` says how it is run.
///
/// A picture is seen whole, as its overview, and in up to `maxSliceNums` slices of about `scaleResolution` squared pixels (1: none).
/// `tokenPatches` patches a side, each of `patchSize` pixels a side, give one image token. `workingBytes` is what the tower takes for
/// the largest crop, beside the weights in `data`.
public struct VisionRecord: Equatable, Sendable {
    public static let roles: [Role] = [.visionPrepare, .visionTower]
    public static let channels = 3

    public let kind: VisionKind
    public let parts: [Part]
    public let data: String
    public let patchSize: Int
    public let tokenPatches: Int
    public let scaleResolution: Int
    public let maxSliceNums: Int
    public let tokens: VisionTokens
    public let texts: VisionTexts
    public let numParameters: Int
    public let workingBytes: Int

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        kind = try record.required("kind").choice()
        parts = try record.required("parts").array(Part.init)
        data = try record.required("data").bundlePath()
        patchSize = try record.required("patch_size").int(1...(1 << 10))
        tokenPatches = try record.required("token_patches").int(of: [2, 4])
        scaleResolution = try record.required("scale_resolution").int(1...(1 << 13))
        maxSliceNums = try record.required("max_slice_nums").int(1...(1 << 8))
        tokens = try VisionTokens(record.required("tokens"))
        texts = try VisionTexts(record.required("texts"))
        numParameters = try record.required("num_parameters").int(1...countLimit)
        workingBytes = try record.required("working_bytes").int(1...countLimit)
        try record.end()
    }

    /// What both sessions take with so many bytes in `data`: for towers of 150 MB to 1 GB, 15 % to 38 % more were measured.
    public static func sessionBytes(weights: Int) -> Int { weights + weights / 3 + (16 << 20) }

    /// The part of a role, which a manifest that was opened has.
    public func part(_ role: Role) -> Part? { parts.first { $0.role == role } }
}

extension BundleManifest {
    /// How many positions a token has: 3 (time, height, width) where pictures lie on a canvas, else 1.
    public var positionRows: Int {
        parts.contains { $0.inputs.contains { $0.name == "position_ids" && $0.shape.count == 3 } } ? 3 : 1
    }

    /// Throws `bundle` for a vision record that no host could run as it is stated.
    func check(_ vision: VisionRecord) throws(LesonnxError) {
        let roles = VisionRecord.roles.map(\.rawValue)
        if vision.parts.map(\.role.rawValue).sorted() != roles {
            throw .bundle("vision has exactly one part of each role: \(roles.joined(separator: ", "))")
        }
        if positionRows != 3 {
            throw .bundle("vision: the model's parts take position_ids [1, T], expected [3, 1, T]")
        }
        if let (name, id) = vision.tokens.byName.first(where: { $0.id >= model.vocabSize }) {
            throw .bundle("vision: tokens.\(name) is \(id), expected less than \(model.vocabSize)")
        }
        if (vision.texts.idStart == nil) != (vision.texts.idEnd == nil) {
            throw .bundle("vision: texts has one of id_start and id_end, expected both or none")
        }
        let pixels = ("pixel_values", ElementType.float32, [1, VisionRecord.channels, vision.patchSize].map(TensorDimension.size) + [.symbol("W")])
        let pair = [TensorDimension.size(2)]
        for part in vision.parts {
            if part.role == .visionPrepare {
                let image = [TensorDimension.symbol("Y"), .symbol("X"), .size(VisionRecord.channels)]
                try check(part, "takes", part.inputs, [("grid", .int64, pair), ("image", .uint8, image), ("size", .int64, pair)])
                try check(part, "gives", part.outputs, [pixels])
            } else {
                let features = [TensorDimension.symbol("I"), .size(model.hiddenSize)]
                try check(part, "takes", part.inputs, [pixels, ("target_size", .int64, pair)])
                try check(part, "gives", part.outputs, [("image_features", .float32, features)])
            }
        }
    }

    /// `expected` in the order of names.
    private func check(
        _ part: Part, _ verb: String, _ values: [Value], _ expected: [(String, ElementType, [TensorDimension])]
    ) throws(LesonnxError) {
        func shown(_ name: String, _ dtype: ElementType, _ shape: [TensorDimension]) -> String { "\(name) \(dtype.rawValue) \(shape)" }
        let found = values.sorted { $0.name < $1.name }.map { shown($0.name, $0.dtype, $0.shape) }
        let wanted = expected.map { shown($0.0, $0.1, $0.2) }
        if found != wanted {
            throw .bundle("part '\(part.name)' \(verb) \(found.joined(separator: ", ")), expected \(wanted.joined(separator: ", "))")
        }
    }
}
