import Foundation

#if canImport(Glibc)
import Glibc
private let streamType = Int32(SOCK_STREAM.rawValue)
private let sendFlags = Int32(MSG_NOSIGNAL)
#else
private let streamType = SOCK_STREAM
private let sendFlags: Int32 = 0
#endif

/// Serves a folder by HTTP/1.1 on the loopback address, one request a connection; what it is told to do wrong, it does once.
///
/// Requests are answered one after another on one thread; the lock guards what tests set and read.
final class TinyServer: @unchecked Sendable {
    enum Fault {
        /// The connection ends after that many bytes of a body.
        case breaksOff(Int)
        case answers(Int)
        /// The body has one bit turned.
        case corrupts
    }

    let port: UInt16
    private let folder: URL
    private let listener: Int32
    private let lock = NSLock()
    private var faults: [String: Fault] = [:]
    private var log: [String] = []
    private var isResuming = true

    init(_ folder: URL) throws {
        self.folder = folder
        let listener = socket(AF_INET, streamType, 0)
        var address = sockaddr_in()
        address.sin_family = sa_family_t(AF_INET)
        address.sin_addr.s_addr = UInt32(0x7F00_0001).bigEndian
        var length = socklen_t(MemoryLayout<sockaddr_in>.size)
        let port = withUnsafeMutablePointer(to: &address) { pointer -> UInt16? in
            pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) { generic in
                guard bind(listener, generic, length) == 0, listen(listener, 16) == 0,
                    getsockname(listener, generic, &length) == 0
                else { return nil }
                return UInt16(bigEndian: pointer.pointee.sin_port)
            }
        }
        guard let port else { throw POSIXError(.EADDRINUSE) }
        self.listener = listener
        self.port = port
        Thread.detachNewThread { [self] in serve() }
    }

    var url: URL { URL(string: "http://127.0.0.1:\(port)")! }

    /// The next answer for that path goes wrong.
    func fail(_ path: String, _ fault: Fault) { lock.withLock { faults[path] = fault } }

    func ignoreRanges() { lock.withLock { isResuming = false } }

    /// Requests so far: the path, and the range where one was asked for.
    var requests: [String] { lock.withLock { log } }

    func stop() {
        shutdown(listener, Int32(SHUT_RDWR))
        close(listener)
    }

    private func serve() {
        while true {
            let connection = accept(listener, nil, nil)
            if connection < 0 {
                return
            }
            answer(connection)
            close(connection)
        }
    }

    private func answer(_ connection: Int32) {
        var head = ""
        var buffer = [UInt8](repeating: 0, count: 4096)
        while !head.contains("\r\n\r\n") {
            let count = recv(connection, &buffer, buffer.count, 0)
            if count <= 0 {
                return
            }
            head += String(decoding: buffer[..<count], as: UTF8.self)
        }
        let lines = head.components(separatedBy: "\r\n")
        let path = String(lines[0].split(separator: " ")[1].dropFirst()).removingPercentEncoding ?? ""
        let range = lines.first { $0.lowercased().hasPrefix("range: bytes=") }?.dropFirst(13)
        let start = range.flatMap { Int($0.dropLast()) } ?? 0
        let (fault, resumes) = lock.withLock {
            log.append(range.map { "\(path) \($0)" } ?? path)
            return (faults.removeValue(forKey: path), isResuming)
        }
        if case .answers(let status) = fault {
            send(connection, Data("HTTP/1.1 \(status) No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".utf8))
            return
        }
        guard var body = try? Data(contentsOf: folder.appending(path: path)) else {
            send(connection, Data("HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnone".utf8))
            return
        }
        if case .corrupts = fault, !body.isEmpty {
            body[0] ^= 1
        }
        let total = body.count
        var status = "200 OK\r\n"
        if range != nil && resumes {
            if start >= total {
                send(connection, Data("HTTP/1.1 416 Range\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".utf8))
                return
            }
            body = body.dropFirst(start)
            status = "206 Partial Content\r\nContent-Range: bytes \(start)-\(total - 1)/\(total)\r\n"
        }
        send(connection, Data("HTTP/1.1 \(status)Content-Length: \(body.count)\r\nConnection: close\r\n\r\n".utf8))
        if case .breaksOff(let count) = fault {
            body = body.prefix(count)
        }
        send(connection, body)
    }

    private func send(_ connection: Int32, _ data: Data) {
        let bytes = [UInt8](data)
        var at = 0
        while at < bytes.count {
            let count = bytes[at...].withUnsafeBytes { Self.write(connection, $0) }
            if count <= 0 {
                return
            }
            at += count
        }
    }

    private static func write(_ connection: Int32, _ bytes: UnsafeRawBufferPointer) -> Int {
        #if canImport(Glibc)
        return Glibc.send(connection, bytes.baseAddress, bytes.count, sendFlags)
        #else
        return Darwin.send(connection, bytes.baseAddress, bytes.count, sendFlags)
        #endif
    }
}
