import Foundation

/// One expert of a bundle. `number` counts all, layer by layer, a layer's shared one after its routed ones.
public struct Expert: Equatable, Sendable, CustomStringConvertible {
    public let number: Int
    public let layerIdx: Int
    /// nil for a shared expert.
    public let expertIdx: Int?
    /// Of the manifest's `expertKinds`.
    public let kind: Int
    /// Where it starts in its layer's pack.
    public let offsetBytes: Int
    public let lengthBytes: Int
    /// What it costs in the cache: its length in whole pages.
    public let costBytes: Int

    public var description: String {
        "layer \(layerIdx) " + (expertIdx.map { "expert \($0)" } ?? "shared expert")
    }
}

/// An opened bundle directory: its manifest, its files, and whether they are all there. Immutable, safe to share.
/// (`Bundle` would be Foundation's.)
public struct ModelBundle: Sendable {
    public let directory: URL
    public let manifest: BundleManifest
    /// Every expert by its number.
    public let experts: [Expert]
    private let resolved: String
    private let layers: [Int: ExpertLayer]

    /// Throws `bundle` where the directory is no bundle, a file is missing or has another length than the manifest says, or a
    /// link leads out of it.
    public init(directory: URL) throws(LesonnxError) {
        let path = directory.path(percentEncoded: false)
        var isDirectory: ObjCBool = false
        guard FileManager.default.fileExists(atPath: path, isDirectory: &isDirectory), isDirectory.boolValue,
            let resolved = resolvedPath(path)
        else { throw .bundle("\(path): no such bundle directory") }
        self.directory = directory
        self.resolved = resolved
        let manifestURL = directory.appending(path: "manifest.json")
        let manifestPath = manifestURL.path(percentEncoded: false)
        if !FileManager.default.fileExists(atPath: manifestPath) {
            throw .bundle("\(path): not a bundle, it holds no manifest.json")
        }
        try checkInside(manifestPath, resolved)
        guard let text = try? Data(contentsOf: manifestURL) else { throw .bundle("\(manifestPath): not readable") }
        manifest = try BundleManifest(parsing: text, source: manifestPath)
        layers = Dictionary(manifest.expertLayers.map { ($0.layerIdx, $0) }, uniquingKeysWith: { first, _ in first })
        experts = Self.number(manifest)
        try checkFiles()
    }

    private static func number(_ manifest: BundleManifest) -> [Expert] {
        var experts: [Expert] = []
        for layer in manifest.expertLayers {
            let stride = manifest.expertKinds[layer.kind].costBytes
            func add(_ expertIdx: Int?, _ kind: Int, _ offset: Int) {
                let stored = manifest.expertKinds[kind]
                experts.append(
                    Expert(
                        number: experts.count, layerIdx: layer.layerIdx, expertIdx: expertIdx, kind: kind,
                        offsetBytes: offset, lengthBytes: stored.lengthBytes, costBytes: stored.costBytes))
            }
            for expertIdx in 0..<layer.numExperts {
                add(expertIdx, layer.kind, expertIdx * stride)
            }
            if let kind = layer.sharedKind {
                add(nil, kind, layer.numExperts * stride)
            }
        }
        return experts
    }

    private func checkFiles() throws(LesonnxError) {
        for part in manifest.parts + (manifest.drafter?.parts ?? []) + (manifest.vision?.parts ?? []) {
            _ = try file(part.path)
        }
        if let vision = manifest.vision {
            _ = try file(vision.data)
        }
        for path in manifest.twins?.paths ?? [] {
            _ = try file(path)
        }
        for stage in manifest.expertKinds.compactMap(\.stage) {
            _ = try file(stage)
        }
        for layer in manifest.expertLayers {
            let pack = try file(layer.pack)
            let found = try sizeBytes(of: pack)
            let expected = packBytes(layer)
            if found != expected {
                throw .bundle("\(pack.path(percentEncoded: false)): has \(found) bytes, expected \(expected); export again")
            }
        }
        for expert in experts {
            _ = try file(modelPath(of: expert))
        }
    }

    /// A file of the bundle by its relative path; throws `bundle` where it is missing or a link leads out of the bundle.
    public func file(_ relative: String) throws(LesonnxError) -> URL {
        let url = directory.appending(path: relative)
        let path = url.path(percentEncoded: false)
        var isDirectory: ObjCBool = false
        guard FileManager.default.fileExists(atPath: path, isDirectory: &isDirectory), !isDirectory.boolValue else {
            throw .bundle("\(path): missing from the bundle")
        }
        try checkInside(path, resolved)
        return url
    }

    /// The pack of a layer, which opening has found whole.
    public func packFile(layerIdx: Int) throws(LesonnxError) -> URL {
        guard let layer = layers[layerIdx] else { throw .bundle("\(directory.lastPathComponent): no MoE layer \(layerIdx)") }
        return directory.appending(path: layer.pack)
    }

    /// An expert's own .onnx, beside its pack, relative to the bundle.
    public func modelPath(of expert: Expert) -> String {
        let pack = layers[expert.layerIdx]?.pack ?? ""
        let folder = pack.lastIndex(of: "/").map { pack[...$0] } ?? ""
        guard let number = expert.expertIdx else { return folder + "shared.onnx" }
        let digits = String(number)
        return folder + "expert_" + String(repeating: "0", count: max(0, 3 - digits.count)) + digits + ".onnx"
    }

    // MARK: bytes

    public func packBytes(_ layer: ExpertLayer) -> Int {
        layer.numExperts * manifest.expertKinds[layer.kind].costBytes + sharedBytes(layer)
    }

    /// All experts together.
    public var expertBytes: Int { manifest.expertLayers.reduce(0) { $0 + packBytes($1) } }

    /// What one token needs of a layer: k experts and the shared one.
    public func layerDemandBytes(_ layer: ExpertLayer) -> Int {
        layer.numExpertsPerTok * manifest.expertKinds[layer.kind].costBytes + sharedBytes(layer)
    }

    /// The least expert budget: the largest layer's demand.
    public var leastBudgetBytes: Int { manifest.expertLayers.map(layerDemandBytes).max() ?? 0 }

    /// What one token needs of all layers; under this a cache cannot hold from one token to the next.
    public var tokenDemandBytes: Int { manifest.expertLayers.reduce(0) { $0 + layerDemandBytes($1) } }

    private func sharedBytes(_ layer: ExpertLayer) -> Int {
        layer.sharedKind.map { manifest.expertKinds[$0].costBytes } ?? 0
    }
}

/// The length of a file; throws `bundle` where it cannot be told.
public func sizeBytes(of file: URL) throws(LesonnxError) -> Int {
    let path = file.path(percentEncoded: false)
    guard let attributes = try? FileManager.default.attributesOfItem(atPath: path), let size = attributes[.size] as? NSNumber
    else { throw .bundle("\(path): not readable") }
    return size.intValue
}

/// Links and `..` resolved; nil where nothing is there.
private func resolvedPath(_ path: String) -> String? {
    guard let resolved = realpath(path, nil) else { return nil }
    defer { free(resolved) }
    return String(cString: resolved)
}

private func checkInside(_ path: String, _ directory: String) throws(LesonnxError) {
    guard let resolved = resolvedPath(path) else { throw .bundle("\(path): a link that leads nowhere") }
    let inside = directory.hasSuffix("/") ? directory : directory + "/"
    if !resolved.utf8.starts(with: inside.utf8) {
        throw .bundle("\(path): leads out of the bundle")
    }
}
