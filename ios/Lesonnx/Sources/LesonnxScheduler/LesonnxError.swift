import Foundation

/// Everything that can go wrong, under the names of the Python runtime's errors. The text is one line: the thing, what was
/// expected, what was found.
public enum LesonnxError: Error, Equatable, Sendable, CustomStringConvertible {
    /// Bad usage or bad input.
    case input(String)
    /// A bundle that cannot be run: a missing or corrupt file, a wrong version, a path that leaves it.
    case bundle(String)
    /// A memory budget under the least that the bundle needs.
    case budget(String)
    /// A prompt or request that does not fit the model's context.
    case context(String)
    /// An expert that could not be read, twice.
    case load(String)
    /// An event that cannot happen in the scheduler's state: a fault of the host.
    case schedule(String)
    /// Any other failure while working: ONNX Runtime, the system, broken logits.
    case failure(String)

    public var description: String {
        switch self {
        case .input(let text), .bundle(let text), .budget(let text), .context(let text), .load(let text),
            .schedule(let text), .failure(let text):
            return text
        }
    }

    /// Whether what was given is wrong (exit code 2), not something that failed on the way (exit code 1).
    public var isInput: Bool {
        switch self {
        case .input, .bundle, .budget, .context: return true
        case .load, .schedule, .failure: return false
        }
    }
}

/// So that `localizedDescription`, which most apps show, is that line too.
extension LesonnxError: LocalizedError {
    public var errorDescription: String? { description }
}
