import Foundation
import LesonnxScheduler

#if os(iOS)
import os
#endif

/// What a bundle needs of a device, in bytes.
public struct BundleNeeds: Equatable, Sendable {
    /// An allowance for the runtime itself and for the activations of a prefill chunk.
    public static let runtimeBytes = 200_000_000
    /// An allowance for a picture of about 2048 x 1536 pixels while it is prepared.
    public static let pictureBytes = 100_000_000

    public var diskBytes: Int
    /// Dense parts, which stay in memory.
    public var denseBytes: Int
    /// Attention caches and those of a drafter that comes with the model, for the tokens asked for; states of fixed shape.
    public var stateBytes: Int
    /// Under this nothing runs.
    public var leastExpertBytes: Int
    /// Under this little can stay in memory from one token to the next.
    public var tokenExpertBytes: Int
    public var allExpertBytes: Int
    /// What reading pictures takes for that time: eyes, what they work with, a picture. 0 for a bundle without.
    public var visionBytes: Int

    /// From sizes that are known already, such as those of a `ModelSpec` (`stateBytesPerToken` times the tokens wanted).
    public init(
        diskBytes: Int, denseBytes: Int, stateBytes: Int, leastExpertBytes: Int, tokenExpertBytes: Int, allExpertBytes: Int,
        visionBytes: Int = 0
    ) {
        self.diskBytes = diskBytes
        self.denseBytes = denseBytes
        self.stateBytes = stateBytes
        self.leastExpertBytes = leastExpertBytes
        self.tokenExpertBytes = tokenExpertBytes
        self.allExpertBytes = allExpertBytes
        self.visionBytes = visionBytes
    }

    /// `contextTokens`: how long a conversation is to be; at most what the model takes.
    public init(_ manifest: BundleManifest, _ checksums: Checksums, contextTokens: Int) {
        let shapes = manifest.layerShapes
        let demands = shapes.map { $0.numExpertsPerTok * $0.costBytes + $0.sharedCostBytes }
        diskBytes = checksums.totalBytes
        denseBytes = checksums.denseBytes
        let tokens = min(contextTokens, manifest.model.maxPositionEmbeddings)
        stateBytes = manifest.stateBytes(contextTokens: tokens) + manifest.drafterCacheBytes(capacityTokens: tokens)
        leastExpertBytes = demands.max() ?? 0
        tokenExpertBytes = demands.reduce(0, +)
        visionBytes = manifest.vision.map {
            Self.visionBytes(fileBytes: checksums.sizeBytes(of: $0.data), workingBytes: $0.workingBytes)
        } ?? 0
        allExpertBytes = shapes.reduce(0) { $0 + $1.numExperts * $1.costBytes + $1.sharedCostBytes }
    }

    /// What reading pictures takes, from sizes that are known already.
    public static func visionBytes(fileBytes: Int, workingBytes: Int) -> Int {
        VisionRecord.sessionBytes(weights: fileBytes) + workingBytes + pictureBytes
    }

    /// All but the experts. With an expert budget alone, what reading pictures takes must be free at any time; with a memory budget
    /// experts give way for it.
    public var fixedBytes: Int { Self.runtimeBytes + denseBytes + stateBytes + visionBytes }

    public var leastMemoryBytes: Int { fixedBytes + leastExpertBytes }
}

/// What a device has for an app now, in bytes.
public struct DeviceOffer: Equatable, Sendable {
    public var memoryBytes: Int
    public var freeDiskBytes: Int

    public init(memoryBytes: Int, freeDiskBytes: Int) {
        self.memoryBytes = memoryBytes
        self.freeDiskBytes = freeDiskBytes
    }

    /// Of this device: memory that this app may still take, and space where `folder` lies.
    public static func current(for folder: URL) -> DeviceOffer {
        DeviceOffer(memoryBytes: availableMemoryBytes(), freeDiskBytes: freeBytes(at: folder))
    }

    private static func availableMemoryBytes() -> Int {
        #if os(iOS)
        // 0 in the simulator, which has no limit.
        let left = os_proc_available_memory()
        return left > 0 ? left : Int(ProcessInfo.processInfo.physicalMemory / 2)
        #else
        let lines = (try? String(contentsOfFile: "/proc/meminfo", encoding: .utf8))?.split(separator: "\n") ?? []
        let words = lines.first { $0.hasPrefix("MemAvailable:") }?.split(separator: " ")
        return words.flatMap { Int($0[1]) }.map { $0 * 1024 } ?? Int(ProcessInfo.processInfo.physicalMemory / 2)
        #endif
    }

    private static func freeBytes(at folder: URL) -> Int {
        #if canImport(Darwin)
        // With what the system would drop because it can be had again.
        let key = URLResourceKey.volumeAvailableCapacityForImportantUsageKey
        if let free = try? folder.resourceValues(forKeys: [key]).volumeAvailableCapacityForImportantUsage {
            return Int(free)
        }
        #endif
        let attributes = try? FileManager.default.attributesOfFileSystem(forPath: folder.path(percentEncoded: false))
        return (attributes?[.systemFreeSize] as? NSNumber)?.intValue ?? 0
    }
}

/// Whether a bundle fits a device, and with what expert budget.
public enum Fit: Equatable, Sendable {
    /// Runs; `isTight` where the experts get less than one token uses of all layers, so that few stay in memory.
    case fits(expertBudgetBytes: Int, isTight: Bool)
    case tooLittleMemory(needsBytes: Int, hasBytes: Int)
    case tooLittleSpace(needsBytes: Int, hasBytes: Int)

    /// `isStored`: the bundle is on the device already, so it needs no more space.
    public init(_ needs: BundleNeeds, on device: DeviceOffer, isStored: Bool) {
        // A tenth stays free for the app's own views, since the system ends an app that takes all.
        let memory = device.memoryBytes / 10 * 9
        if !isStored && needs.diskBytes > device.freeDiskBytes {
            self = .tooLittleSpace(needsBytes: needs.diskBytes, hasBytes: device.freeDiskBytes)
        } else if needs.leastMemoryBytes > memory {
            self = .tooLittleMemory(needsBytes: needs.leastMemoryBytes, hasBytes: memory)
        } else {
            let budget = min(needs.allExpertBytes, memory - needs.fixedBytes)
            self = .fits(expertBudgetBytes: budget, isTight: budget < needs.tokenExpertBytes)
        }
    }

    public var isFitting: Bool {
        if case .fits = self { return true }
        return false
    }

    /// One line for a person.
    public var summary: String {
        switch self {
        case .fits(let budget, false): return "Fits, with \(formatBytes(budget)) for experts."
        case .fits(let budget, true): return "Fits, but slowly: only \(formatBytes(budget)) for experts."
        case .tooLittleMemory(let needs, let has): return "Needs \(formatBytes(needs)) of memory, this device has \(formatBytes(has))."
        case .tooLittleSpace(let needs, let has): return "Needs \(formatBytes(needs)) of storage, this device has \(formatBytes(has))."
        }
    }
}
