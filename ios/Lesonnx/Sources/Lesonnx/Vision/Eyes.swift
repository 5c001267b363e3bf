import LesonnxScheduler

/// The two models by which a bundle sees pictures. Open only while pictures are read; dropping it frees them. One thread at a time.
final class Eyes {
    private let bundle: ModelBundle
    private let vision: VisionRecord
    private let prepare: Session
    private let tower: Session

    /// Throws `input` where the bundle has none, `bundle` where ONNX Runtime does not take them.
    init(_ bundle: ModelBundle, _ environment: OrtEnvironment) throws {
        let vision = try bundle.eyes()
        func session(_ role: Role) throws -> Session {
            guard let part = vision.part(role) else { throw LesonnxError.bundle("vision has no \(role.rawValue)") }
            return try environment.session(bundle.file(part.path).path(percentEncoded: false), .dense)
        }
        self.bundle = bundle
        self.vision = vision
        prepare = try session(.visionPrepare)
        tower = try session(.visionTower)
    }

    /// A picture that is being read, crop after crop in the order of its features.
    struct Reading {
        let picture: Picture
        let views: [PictureView]
        /// float32 [I,H]; complete once no crop is left.
        let features: Tensor
        fileprivate var view = 0
        fileprivate var crop = 0
        fileprivate var numTokens = 0
        /// The view's crops, packed.
        fileprivate var pixels: Tensor?

        init(_ picture: Picture, _ views: [PictureView], _ bundle: ModelBundle) throws {
            self.picture = picture
            self.views = views
            features = Tensor(.float32, [try bundle.eyes().numTokens(views), bundle.manifest.model.hiddenSize])
        }

        var isDone: Bool { view == views.count }
    }

    /// Read the next crop.
    func see(_ reading: inout Reading) throws {
        let view = reading.views[reading.view]
        let patches = vision.patches(view)
        let pixels = try reading.pixels ?? prepare(reading.picture, view)
        reading.pixels = pixels
        let count = vision.tokens(view).height * vision.tokens(view).width
        let inputs = [
            "pixel_values": crop(reading.crop, of: view, pixels),
            "target_size": Tensor([Int64(patches.height), Int64(patches.width)]),
        ]
        let rows = reading.features.slice(reading.numTokens..<reading.numTokens + count, axis: 0)
        try Binding(tower, inputs: inputs, outputs: ["image_features": rows]).run()
        reading.numTokens += count
        reading.crop += 1
        if reading.crop == view.numCrops {
            (reading.view, reading.crop, reading.pixels) = (reading.view + 1, 0, nil)
        }
    }

    /// One crop of a view that was prepared, copied: [1,3,P,W].
    func crop(_ number: Int, of view: PictureView, _ pixels: Tensor) -> Tensor {
        let patches = vision.patches(view)
        let columns = patches.height * patches.width * vision.patchSize
        return pixels.columns(number * columns..<(number + 1) * columns)
    }

    /// The crops of a view, row by row along the last axis: float32 [1,3,P,W].
    func prepare(_ picture: Picture, _ view: PictureView) throws -> Tensor {
        let patches = vision.patches(view)
        let columns = view.numCrops * patches.height * patches.width * vision.patchSize
        let pixels = Tensor(.float32, [1, VisionRecord.channels, vision.patchSize, columns])
        try picture.rgb.withUnsafeBytes { bytes in
            guard let start = bytes.baseAddress else { return }
            // Sessions only read what they are given.
            let image = Tensor(
                .uint8, [picture.height, picture.width, VisionRecord.channels], at: UnsafeMutableRawPointer(mutating: start), of: self)
            let inputs = [
                "image": image, "size": Tensor([Int64(view.size.height), Int64(view.size.width)]),
                "grid": Tensor([Int64(view.grid.height), Int64(view.grid.width)]),
            ]
            try Binding(prepare, inputs: inputs, outputs: ["pixel_values": pixels]).run()
        }
        return pixels
    }
}

extension ModelBundle {
    /// How the bundle sees pictures. Throws `input` where it does not.
    func eyes() throws(LesonnxError) -> VisionRecord {
        guard let vision = manifest.vision else {
            throw .input("\(directory.lastPathComponent): has no eyes; it takes no pictures")
        }
        return vision
    }

    /// What preparing takes of a pixel beside its three bytes: 4.2 were measured.
    private static let preparingBytes = 8

    /// What reading such a picture takes at most beside its pixels and features: the sessions, its crops, and what preparing takes, or
    /// the tower later.
    func readingBytes(_ size: Extent, _ views: [PictureView]) throws -> Int {
        let vision = try eyes()
        let weights = try sizeBytes(of: file(vision.data))
        let packed = views.reduce(0) { $0 + $1.size.height * $1.size.width * VisionRecord.channels * ElementType.float32.byteCount }
        let preparing = size.height * size.width * Self.preparingBytes + packed
        return VisionRecord.sessionBytes(weights: weights) + packed + max(preparing, vision.workingBytes)
    }

    func featureBytes(_ views: [PictureView]) throws -> Int {
        try eyes().numTokens(views) * manifest.model.hiddenSize * ElementType.float32.byteCount
    }
}

extension Tensor {
    /// A range of the last axis, copied.
    fileprivate func columns(_ range: Range<Int>) -> Tensor {
        let all = shape[shape.count - 1]
        let copy = Tensor(dtype, shape.dropLast() + [range.count])
        let size = dtype.byteCount
        for row in 0..<shape.dropLast().reduce(1, *) {
            (copy.pointer + row * range.count * size).copyMemory(
                from: pointer + (row * all + range.lowerBound) * size, byteCount: range.count * size)
        }
        return copy
    }
}
