import Foundation
import LesonnxScheduler

/// Anonymous memory on a page boundary, given to the process only where it is written: a piece of the kernel's cache.
///
/// Unchecked: any thread may fill a range; whoever allots ranges sees to it that nobody else uses it.
final class MappedMemory: @unchecked Sendable {
    let pointer: UnsafeMutableRawPointer
    let byteCount: Int

    /// Throws `failure` where the system refuses the memory.
    init(byteCount: Int) throws {
        guard let mapped = Self.map(byteCount, at: nil) else {
            throw LesonnxError.failure("the system gives no memory of \(byteCount) bytes for experts: \(lastError())")
        }
        pointer = mapped
        self.byteCount = byteCount
        #if os(Linux)
        // A kernel without huge pages refuses; ordinary ones do.
        madvise(pointer, byteCount, Int32(MADV_HUGEPAGE))
        #endif
    }

    deinit { munmap(pointer, byteCount) }

    private static func map(_ byteCount: Int, at place: UnsafeMutableRawPointer?) -> UnsafeMutableRawPointer? {
        let flags = place == nil ? MAP_PRIVATE | mapAnonymous : MAP_PRIVATE | mapAnonymous | MAP_FIXED
        let mapped = mmap(place, byteCount, PROT_READ | PROT_WRITE, flags, -1, 0)
        return mapped == MAP_FAILED ? nil : mapped
    }

    /// Return a range of whole pages to the system: its contents are gone, it may be written again.
    func giveBack(_ range: Range<Int>) {
        if range.isEmpty {
            return
        }
        #if os(Linux)
        madvise(pointer + range.lowerBound, range.count, Int32(MADV_DONTNEED))
        #else
        // Darwin keeps pages of MADV_DONTNEED in the process's account; fresh ones over them do not count.
        _ = Self.map(range.count, at: pointer + range.lowerBound)
        #endif
    }
}

#if os(Linux)
private let mapAnonymous = Int32(MAP_ANONYMOUS)
#else
private let mapAnonymous = MAP_ANON
#endif

/// What the system said last, in words.
func lastError() -> String { String(cString: strerror(errno)) }
