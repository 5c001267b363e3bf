import Foundation
import LesonnxScheduler

#if canImport(FoundationNetworking)
import FoundationNetworking
#endif

/// Fetches one URL into a file, going on where the file ends.
///
/// A data task that writes as bytes come, since download tasks keep what they have in a place and form of their own. Each fetch
/// has a session of its own, which ends with it.
enum HTTPFile {
    /// Appends to `file` what it lacks of `url`. `progress` hears of bytes as they are written.
    ///
    /// Where the server does not resume, it starts anew and `progress` hears a negative number. Throws `failure` for what the server
    /// or the network says, CancellationError when its task is cancelled; what has come by then stays in the file.
    static func fetch(
        _ url: URL, appendingTo file: URL, configuration: URLSessionConfiguration = .default,
        progress: @escaping @Sendable (Int) -> Void
    ) async throws {
        let path = file.path(percentEncoded: false)
        if !FileManager.default.fileExists(atPath: path) && !FileManager.default.createFile(atPath: path, contents: nil) {
            throw LesonnxError.failure("\(path): cannot be written")
        }
        let handle = try FileHandle(forWritingTo: file)
        defer { try? handle.close() }
        let have = Int(try handle.seekToEnd())
        var request = URLRequest(url: url)
        // A compressed answer would have another length than the file.
        request.setValue("identity", forHTTPHeaderField: "Accept-Encoding")
        if have > 0 {
            request.setValue("bytes=\(have)-", forHTTPHeaderField: "Range")
        }
        let receiver = Receiver(handle, have: have, url: url, progress: progress)
        let session = URLSession(configuration: configuration, delegate: receiver, delegateQueue: nil)
        defer { session.finishTasksAndInvalidate() }
        let task = session.dataTask(with: request)
        try await withTaskCancellationHandler {
            try await withCheckedThrowingContinuation { continuation in
                receiver.begin(continuation)
                task.resume()
            }
        } onCancel: {
            task.cancel()
        }
    }
}

/// The session's delegate. Its queue calls it once at a time, after `begin`: that, and nothing else, guards its state.
private final class Receiver: NSObject, URLSessionDataDelegate, @unchecked Sendable {
    private let handle: FileHandle
    private let have: Int
    private let url: URL
    private let progress: @Sendable (Int) -> Void
    private var continuation: CheckedContinuation<Void, any Error>?
    private var failure: (any Error)?
    private var isWanted = false

    init(_ handle: FileHandle, have: Int, url: URL, progress: @escaping @Sendable (Int) -> Void) {
        self.handle = handle
        self.have = have
        self.url = url
        self.progress = progress
    }

    func begin(_ continuation: CheckedContinuation<Void, any Error>) {
        self.continuation = continuation
    }

    func urlSession(
        _ session: URLSession, dataTask: URLSessionDataTask, didReceive response: URLResponse,
        completionHandler: @escaping @Sendable (URLSession.ResponseDisposition) -> Void
    ) {
        do {
            isWanted = try prepare(response)
        } catch {
            failure = error
        }
        completionHandler(.allow)
    }

    /// Whether the body belongs into the file, which is made ready for it.
    private func prepare(_ response: URLResponse) throws -> Bool {
        guard let answer = response as? HTTPURLResponse else { return true }
        switch answer.statusCode {
        case 206:
            let range = answer.value(forHTTPHeaderField: "Content-Range") ?? ""
            if !range.hasPrefix("bytes \(have)-") {
                throw LesonnxError.failure("\(url.absoluteString): asked for bytes from \(have), got '\(range)'")
            }
            return true
        case 200:
            if have > 0 {
                try handle.truncate(atOffset: 0)
                progress(-have)
            }
            return true
        case 416:
            return false  // the file has all there is, or more: its checksum will tell
        default:
            throw LesonnxError.failure("\(url.absoluteString): the server answered \(answer.statusCode)")
        }
    }

    func urlSession(_ session: URLSession, dataTask: URLSessionDataTask, didReceive data: Data) {
        if failure != nil {
            dataTask.cancel()
        } else if isWanted {
            do {
                try handle.write(contentsOf: data)
                progress(data.count)
            } catch {
                failure = LesonnxError.failure("\(url.lastPathComponent): cannot be written; is the device full?")
                dataTask.cancel()
            }
        }
    }

    func urlSession(_ session: URLSession, task: URLSessionTask, didCompleteWithError error: (any Error)?) {
        let waiting = continuation
        continuation = nil
        if let failure {
            waiting?.resume(throwing: failure)
        } else if let error, (error as? URLError)?.code == .cancelled {
            waiting?.resume(throwing: CancellationError())
        } else if let error {
            waiting?.resume(throwing: LesonnxError.failure("\(url.absoluteString): \(error.localizedDescription)"))
        } else {
            waiting?.resume()
        }
    }
}
