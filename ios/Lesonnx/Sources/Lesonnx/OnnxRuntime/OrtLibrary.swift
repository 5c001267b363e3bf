import COnnxRuntime
import Foundation
import LesonnxScheduler

/// ONNX Runtime's table of functions: linked on Apple systems, on others loaded once from `LESONNX_ORT_LIBRARY` or the system.
///
/// Unchecked: the table never changes, and its functions may be called from any thread.
struct OrtLibrary: @unchecked Sendable {
    let api: UnsafePointer<OrtApi>
    let base: UnsafePointer<OrtApiBase>
    /// The runtime's own version, such as 1.24.2.
    let version: String

    private static let loaded = Result(catching: load)

    /// The runtime of this process. Throws `failure` where there is none, or one older than 1.21.
    static func shared() throws -> OrtLibrary { try loaded.get() }

    private static func load() throws -> OrtLibrary {
        var message = [CChar](repeating: 0, count: 512)
        let path = ProcessInfo.processInfo.environment["LESONNX_ORT_LIBRARY"]
        guard let base = lesonnx_ort_base(path, &message, message.count) else {
            throw LesonnxError.failure(text(message))
        }
        let version = String(cString: base.pointee.GetVersionString()!)
        guard let api = base.pointee.GetApi(UInt32(LESONNX_ORT_API)) else {
            throw LesonnxError.failure("ONNX Runtime 1.\(LESONNX_ORT_API) or later is needed, found \(version)")
        }
        return OrtLibrary(api: api, base: base, version: version)
    }

    /// Throws a status as one line, released.
    func check(_ status: OpaquePointer?) throws(OrtError) {
        guard let status else { return }
        defer { api.pointee.ReleaseStatus(status) }
        throw OrtError(message: firstLine(String(cString: api.pointee.GetErrorMessage(status)!)))
    }

    /// What a function gave by its last argument. Throws its status.
    func make(_ function: (UnsafeMutablePointer<OpaquePointer?>) -> OpaquePointer?) throws(OrtError) -> OpaquePointer {
        var made: OpaquePointer?
        try check(function(&made))
        guard let made else { throw OrtError(message: "ONNX Runtime gave neither a result nor an error") }
        return made
    }
}

/// What ONNX Runtime says went wrong, on one line; the caller says of what.
struct OrtError: Error, CustomStringConvertible {
    let message: String
    var description: String { message }
}

/// A library's message on one line, its middle left out where it is long.
private func firstLine(_ message: String) -> String {
    let line = message.split(whereSeparator: \.isWhitespace).joined(separator: " ")
    return line.count <= 400 ? line : "\(line.prefix(200)) … \(line.suffix(200))"
}

private func text(_ characters: [CChar]) -> String {
    String(decoding: characters.prefix { $0 != 0 }.map { UInt8(bitPattern: $0) }, as: UTF8.self)
}
