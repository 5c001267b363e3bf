import COnnxRuntime
import Foundation
import LesonnxScheduler

/// The external data of models, mapped: ONNX Runtime's CoreML provider takes weights from memory and not from a file.
///
/// Unchecked: it is read and never written.
final class ExternalData: @unchecked Sendable {
    let name: String
    fileprivate let bytes: NSData

    /// Throws `bundle` where the file cannot be read.
    init(file: URL) throws {
        name = file.lastPathComponent
        guard let mapped = try? NSData(contentsOf: file, options: .alwaysMapped) else {
            throw LesonnxError.bundle("\(file.path(percentEncoded: false)): not readable")
        }
        bytes = mapped
    }
}

extension OrtEnvironment {
    /// The execution providers that this ONNX Runtime has, by name.
    func availableProviders() throws -> [String] {
        let api = library.api
        var names: UnsafeMutablePointer<UnsafeMutablePointer<CChar>?>?
        var count: Int32 = 0
        try library.check(api.pointee.GetAvailableProviders(&names, &count))
        defer { api.pointee.ReleaseStatus(api.pointee.ReleaseAvailableProviders(names, count)) }
        return (0..<Int(count)).compactMap { names?[$0].map { String(cString: $0) } }
    }

    /// A session of a dense part on one provider. On an accelerator it opens only where that takes all of the part: one of which the
    /// CPU would run a piece is slower than the plain part. Throws `bundle` where ONNX Runtime does not take
    /// it so.
    func session(_ path: String, on provider: Provider, _ data: ExternalData?) throws -> Session {
        do {
            let options = try options(.dense)
            defer { library.api.pointee.ReleaseSessionOptions(options) }
            if provider.name != Provider.cpu.name {
                try append(provider, to: options)
            }
            if provider.isAccelerator {
                let api = library.api
                try library.check(api.pointee.AddSessionConfigEntry(options, "session.disable_cpu_ep_fallback", "1"))
            }
            if let data, data.bytes.length > 0 {
                try add(data, to: options)
            }
            return try open(path, options, keeping: data)
        } catch let error as OrtError {
            throw LesonnxError.bundle("\(path): ONNX Runtime does not take it: \(error.message)")
        }
    }

    /// The C interface knows providers by their short names: CoreML, QNN, XNNPACK.
    private func append(_ provider: Provider, to options: OpaquePointer) throws(OrtError) {
        let suffix = "ExecutionProvider"
        let short = provider.name.hasSuffix(suffix) ? String(provider.name.dropLast(suffix.count)) : provider.name
        let (keys, values) = (Array(provider.options.keys), Array(provider.options.values))
        let status = withCStrings(keys) { keys in
            withCStrings(values) { values in
                library.api.pointee.SessionOptionsAppendExecutionProvider(
                    options, short == "Xnnpack" ? "XNNPACK" : short, keys, values, provider.options.count)
            }
        }
        try library.check(status)
    }

    private func add(_ data: ExternalData, to options: OpaquePointer) throws(OrtError) {
        let status = withCStrings([data.name]) { names in
            var buffer: UnsafeMutablePointer<CChar>? = UnsafeMutableRawPointer(mutating: data.bytes.bytes)
                .assumingMemoryBound(to: CChar.self)
            var length = data.bytes.length
            return library.api.pointee.AddExternalInitializersFromFilesInMemory(options, names, &buffer, &length, 1)
        }
        try library.check(status)
    }

    /// An array of C strings for as long as `body` runs.
    private func withCStrings<Result>(
        _ strings: [String], _ body: (UnsafePointer<UnsafePointer<CChar>?>?) -> Result
    ) -> Result {
        let copies = strings.map { strdup($0) }
        defer { copies.forEach { free($0) } }
        return copies.map { UnsafePointer($0) }.withUnsafeBufferPointer { body($0.baseAddress) }
    }
}
