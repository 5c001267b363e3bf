import Foundation
import LesonnxScheduler

/// A pack opened for reading past the page cache, or through it with the range dropped where that is refused.
///
/// Unchecked: every read names its own offset, and the descriptor is exchanged under a lock.
final class PackFile: @unchecked Sendable {
    private let path: String
    private let lock = NSLock()
    private var descriptor: Int32
    private var isDirect: Bool
    private var replaced: Int32 = -1  // a direct descriptor that reads refused; others may still be using it

    /// Throws `load` where it cannot be opened.
    init(path: String) throws {
        self.path = path
        #if os(Linux)
        descriptor = open(path, O_RDONLY | O_CLOEXEC | directFlag)
        isDirect = descriptor >= 0
        if !isDirect && errno == EINVAL {
            descriptor = open(path, O_RDONLY | O_CLOEXEC)
        }
        #else
        isDirect = false
        descriptor = open(path, O_RDONLY | O_CLOEXEC)
        if descriptor >= 0 {
            _ = fcntl(descriptor, F_NOCACHE, 1)
        }
        #endif
        if descriptor < 0 {
            throw LesonnxError.load("\(path): \(lastError())")
        }
    }

    deinit {
        close(descriptor)
        if replaced >= 0 {
            close(replaced)
        }
    }

    /// Fill `target` (whole aligned pages) from an aligned offset. Throws `load` where the file ends early or cannot be read.
    func read(into target: UnsafeMutableRawBufferPointer, from offsetBytes: Int) throws {
        var done = 0
        while done < target.count {
            let (descriptor, isDirect) = lock.withLock { (self.descriptor, self.isDirect) }
            let count = pread(descriptor, target.baseAddress! + done, target.count - done, off_t(offsetBytes + done))
            if count < 0 {
                let code = errno
                if code == EINTR {
                    continue
                }
                // Some file systems take the flag and refuse the read.
                if code == EINVAL && isDirect {
                    try readBuffered(instead: descriptor)
                    continue
                }
                throw LesonnxError.load("\(path): \(String(cString: strerror(code)))")
            }
            done += max(count, 0)
            if count == 0 || (isDirect && done < target.count && done % pageBytes != 0) {
                throw LesonnxError.load("\(path): ends at byte \(offsetBytes + done), expected more")
            }
        }
        #if os(Linux)
        if !lock.withLock({ isDirect }) {
            _ = posix_fadvise(descriptor, off_t(offsetBytes), off_t(target.count), Int32(POSIX_FADV_DONTNEED))
        }
        #endif
    }

    private func readBuffered(instead refused: Int32) throws {
        lock.lock()
        defer { lock.unlock() }
        if descriptor != refused {
            return
        }
        let buffered = open(path, O_RDONLY | O_CLOEXEC)
        if buffered < 0 {
            throw LesonnxError.load("\(path): \(lastError())")
        }
        (replaced, descriptor, isDirect) = (descriptor, buffered, false)
    }
}

#if os(Linux)
// The C library's macro is not one that Swift imports. The kernel's number differs between processors.
#if arch(arm64) || arch(arm)
private let directFlag: Int32 = 0o200000
#else
private let directFlag: Int32 = 0o40000
#endif
#endif
