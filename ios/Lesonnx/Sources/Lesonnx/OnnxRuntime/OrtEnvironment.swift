import COnnxRuntime
import Foundation
import LesonnxScheduler

/// How a session runs.
enum SessionKind {
    /// A dense part: the graph is optimised, the process's threads share it.
    case dense
    /// A small part that runs beside others: optimised, on the calling thread alone.
    case single
    /// A stage of the kernel: nothing to optimise, the process's threads share it.
    case stage
    /// An expert of its own: a handful of nodes, of which hundreds are in memory; on the calling thread alone.
    case expert

    var isOptimised: Bool { self == .dense || self == .single }
    var sharesThreads: Bool { self == .dense || self == .stage }
}

/// ONNX Runtime's environment with the one pool of threads that all sessions share; its threads sleep when there is nothing to
/// do, since what spins takes a core from the threads that read.
///
/// Unchecked: ONNX Runtime's environments may be used from any thread, and nothing here changes.
final class OrtEnvironment: @unchecked Sendable {
    let library: OrtLibrary
    let numThreads: Int
    private let environment: OpaquePointer

    // Under the condition's lock: the environment in use, and how many ONNX Runtime knows. One that nobody holds any more is let go
    // of on whatever thread dropped it, so it may be there a moment longer.
    private static let condition = NSCondition()
    nonisolated(unsafe) private static weak var current: OrtEnvironment?
    nonisolated(unsafe) private static var numAlive = 0

    /// The environment of this process. ONNX Runtime has one, so its threads cannot be chosen anew while any model is loaded:
    /// throws `input` where they are another number.
    static func shared(numThreads: Int?) throws -> OrtEnvironment {
        condition.lock()
        defer { condition.unlock() }
        let wanted = numThreads ?? numCores
        if let current {
            if let numThreads, numThreads != current.numThreads {
                throw LesonnxError.input(
                    "numThreads is \(numThreads), but a model that is loaded already runs on \(current.numThreads)")
            }
            return current
        }
        while numAlive > 0 {
            condition.wait()
        }
        let made = try OrtEnvironment(numThreads: wanted)
        current = made
        numAlive += 1
        return made
    }

    private init(numThreads: Int) throws {
        library = try OrtLibrary.shared()
        self.numThreads = numThreads
        let api = library.api
        let options = try library.make { api.pointee.CreateThreadingOptions($0) }
        defer { api.pointee.ReleaseThreadingOptions(options) }
        try library.check(api.pointee.SetGlobalIntraOpNumThreads(options, Int32(numThreads)))
        try library.check(api.pointee.SetGlobalInterOpNumThreads(options, 1))
        try library.check(api.pointee.SetGlobalSpinControl(options, 0))
        environment = try library.make {
            api.pointee.CreateEnvWithGlobalThreadPools(ORT_LOGGING_LEVEL_ERROR, "lesonnx", options, $0)
        }
    }

    /// Whether ONNX Runtime's environment, with its threads, is there.
    static var isThere: Bool { condition.withLock { numAlive > 0 } }

    deinit {
        library.api.pointee.ReleaseEnv(environment)
        Self.condition.lock()
        Self.numAlive -= 1
        Self.condition.broadcast()
        Self.condition.unlock()
    }

    /// A session of a model file. Throws `bundle` where ONNX Runtime does not take it.
    func session(_ path: String, _ kind: SessionKind, registersExperts: Bool = false) throws -> Session {
        do {
            let options = try options(kind)
            defer { library.api.pointee.ReleaseSessionOptions(options) }
            if registersExperts {
                try library.check(lesonnx_register_experts(options, library.base))
            }
            return try open(path, options)
        } catch let error as OrtError {
            throw LesonnxError.bundle("\(path): ONNX Runtime does not take it: \(error.message)")
        }
    }

    /// `keeping`: what must live as long as the session.
    func open(_ path: String, _ options: OpaquePointer, keeping kept: AnyObject? = nil) throws(OrtError) -> Session {
        let session = try library.make { library.api.pointee.CreateSession(environment, path, options, $0) }
        return Session(self, session, keeping: kept)
    }

    /// No arena, which would keep each part's largest prefill activations for good, and no memory pattern.
    func options(_ kind: SessionKind) throws -> OpaquePointer {
        let api = library.api
        let options = try library.make { api.pointee.CreateSessionOptions($0) }
        do {
            if kind.sharesThreads {
                try library.check(api.pointee.DisablePerSessionThreads(options))
            } else {
                try library.check(api.pointee.SetIntraOpNumThreads(options, 1))
                try library.check(api.pointee.SetInterOpNumThreads(options, 1))
            }
            try library.check(api.pointee.SetSessionLogSeverityLevel(options, Int32(ORT_LOGGING_LEVEL_ERROR.rawValue)))
            try library.check(api.pointee.DisableCpuMemArena(options))
            try library.check(api.pointee.DisableMemPattern(options))
            let level = kind.isOptimised ? ORT_ENABLE_ALL : ORT_DISABLE_ALL
            try library.check(api.pointee.SetSessionGraphOptimizationLevel(options, level))
        } catch {
            api.pointee.ReleaseSessionOptions(options)
            throw error
        }
        return options
    }

    /// The processors that this process may use.
    static var numCores: Int { ProcessInfo.processInfo.activeProcessorCount }
}
