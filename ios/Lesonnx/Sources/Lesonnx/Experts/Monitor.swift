import Foundation

/// A lock with three conditions, one for each kind of thread that waits.
///
/// Unchecked: these are the system's own mutex and conditions, at addresses of their own.
final class Monitor: @unchecked Sendable {
    enum Condition: Int {
        /// There is something to read, or the end has come.
        case load
        /// There is something to predict, or the end has come.
        case question
        /// A load or a prediction has ended, or a thread has.
        case progress
    }

    private let mutex = UnsafeMutablePointer<pthread_mutex_t>.allocate(capacity: 1)
    private let conditions = UnsafeMutablePointer<pthread_cond_t>.allocate(capacity: 3)

    init() {
        pthread_mutex_init(mutex, nil)
        for number in 0..<3 {
            pthread_cond_init(conditions + number, nil)
        }
    }

    deinit {
        for number in 0..<3 {
            pthread_cond_destroy(conditions + number)
        }
        pthread_mutex_destroy(mutex)
        conditions.deallocate()
        mutex.deallocate()
    }

    func withLock<Result>(_ body: () throws -> Result) rethrows -> Result {
        pthread_mutex_lock(mutex)
        defer { pthread_mutex_unlock(mutex) }
        return try body()
    }

    /// Wait for a condition, with the lock held.
    func wait(for condition: Condition) { pthread_cond_wait(conditions + condition.rawValue, mutex) }

    func signal(_ condition: Condition) { pthread_cond_signal(conditions + condition.rawValue) }

    func broadcast(_ condition: Condition) { pthread_cond_broadcast(conditions + condition.rawValue) }
}
