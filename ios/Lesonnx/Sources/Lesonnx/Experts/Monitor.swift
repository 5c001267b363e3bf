import Foundation

/// A lock with two conditions: what threads that read wait for, and what the thread that computes waits for.
///
/// Unchecked: these are the system's own mutex and conditions, at addresses of their own.
final class Monitor: @unchecked Sendable {
    enum Condition: Int {
        /// There is something to read or to predict, or the end has come.
        case work
        /// A load or a prediction has ended, or a thread has.
        case progress
    }

    private let mutex = UnsafeMutablePointer<pthread_mutex_t>.allocate(capacity: 1)
    private let conditions = UnsafeMutablePointer<pthread_cond_t>.allocate(capacity: 2)

    init() {
        pthread_mutex_init(mutex, nil)
        pthread_cond_init(conditions, nil)
        pthread_cond_init(conditions + 1, nil)
    }

    deinit {
        pthread_cond_destroy(conditions)
        pthread_cond_destroy(conditions + 1)
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
