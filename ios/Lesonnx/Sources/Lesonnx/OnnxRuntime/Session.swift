import COnnxRuntime
import LesonnxScheduler

/// A loaded ONNX model.
///
/// Unchecked: ONNX Runtime's sessions may run in several threads at once, and nothing here changes.
final class Session: @unchecked Sendable {
    let environment: OrtEnvironment
    fileprivate let session: OpaquePointer
    /// What must live as long as the session: memory that it reads.
    private let kept: AnyObject?

    fileprivate var library: OrtLibrary { environment.library }

    init(_ environment: OrtEnvironment, _ session: OpaquePointer, keeping kept: AnyObject? = nil) {
        self.environment = environment
        self.session = session
        self.kept = kept
    }

    deinit { library.api.pointee.ReleaseSession(session) }

    /// The name of its first output.
    func firstOutputName() throws -> String {
        let api = library.api
        var allocator: UnsafeMutablePointer<OrtAllocator>?
        try library.check(api.pointee.GetAllocatorWithDefaultOptions(&allocator))
        var name: UnsafeMutablePointer<CChar>?
        try library.check(api.pointee.SessionGetOutputName(session, 0, allocator, &name))
        guard let name else { return "" }
        defer { api.pointee.ReleaseStatus(api.pointee.AllocatorFree(allocator, name)) }
        return String(cString: name)
    }
}

/// A session bound to tensors that stay where they are: a run reads and writes them in place. Keeps them alive.
///
/// Unchecked: its parts never change; one thread at a time runs it, since a run writes the tensors.
final class Binding: @unchecked Sendable {
    private let session: Session
    private let tensors: [Tensor]
    private let binding: OpaquePointer
    private var values: [OpaquePointer] = []

    /// Throws `bundle` where the session does not know a name or takes another type.
    init(_ session: Session, inputs: [String: Tensor], outputs: [String: Tensor]) throws {
        self.session = session
        tensors = Array(inputs.values) + Array(outputs.values)
        let library = session.library
        let api = library.api
        binding = try library.make { api.pointee.CreateIoBinding(session.session, $0) }
        do {
            let memory = try library.make { api.pointee.CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, $0) }
            defer { api.pointee.ReleaseMemoryInfo(memory) }
            for (name, tensor) in inputs {
                try library.check(api.pointee.BindInput(binding, name, try value(of: tensor, memory)))
            }
            for (name, tensor) in outputs {
                try library.check(api.pointee.BindOutput(binding, name, try value(of: tensor, memory)))
            }
        } catch {
            throw LesonnxError.bundle("a part does not take what the manifest says: \(error.message)")
        }
    }

    private func value(of tensor: Tensor, _ memory: OpaquePointer) throws(OrtError) -> OpaquePointer {
        let api = session.library.api
        let value = try session.library.make { made in
            tensor.shape.map(Int64.init).withUnsafeBufferPointer { shape in
                api.pointee.CreateTensorWithDataAsOrtValue(
                    memory, tensor.pointer, tensor.byteCount, shape.baseAddress, shape.count, tensor.dtype.onnx, made)
            }
        }
        values.append(value)
        return value
    }

    deinit {
        let api = session.library.api
        api.pointee.ReleaseIoBinding(binding)
        values.forEach { api.pointee.ReleaseValue($0) }
    }

    /// Throws `failure` where ONNX Runtime fails.
    func run() throws {
        do {
            try session.library.check(session.library.api.pointee.RunWithBinding(session.session, nil, binding))
        } catch {
            throw LesonnxError.failure("ONNX Runtime failed in a step: \(error.message)")
        }
    }
}
