import Foundation

/// Runs an actor on a thread of its own, so that what blocks for a whole step takes none of the few threads that all tasks share.
///
/// The thread is there from the first job on until `retire`; later jobs get one that ends when they have.
///
/// Unchecked: what changes is under the condition's lock.
final class ThreadExecutor: SerialExecutor, @unchecked Sendable {
    private let condition = NSCondition()
    private var jobs: [UnownedJob] = []
    private var hasThread = false
    private var isRetired = false
    private let name: String

    init(name: String) { self.name = name }

    // Apart from `add`: Swift 6.0's optimiser fails on a consumed job in a function that does more.
    func enqueue(_ job: consuming ExecutorJob) { add(UnownedJob(job)) }

    private func add(_ job: UnownedJob) {
        condition.lock()
        jobs.append(job)
        let needsThread = !hasThread
        hasThread = true
        condition.signal()
        condition.unlock()
        if needsThread {
            let thread = Thread { [self] in
                nameThread(name)
                work()
            }
            thread.qualityOfService = .userInitiated
            // ONNX Runtime computes on the caller's thread too.
            thread.stackSize = 4 << 20
            thread.start()
        }
    }

    private func work() {
        while let job = next() {
            job.runSynchronously(on: asUnownedSerialExecutor())
        }
    }

    private func next() -> UnownedJob? {
        condition.lock()
        defer { condition.unlock() }
        while jobs.isEmpty && !isRetired {
            condition.wait()
        }
        if jobs.isEmpty {
            hasThread = false
            return nil
        }
        return jobs.removeFirst()
    }

    /// Let the thread end once nothing is left to do.
    func retire() {
        condition.lock()
        isRetired = true
        condition.signal()
        condition.unlock()
    }

    /// Whether its thread is there.
    var isRunning: Bool { condition.withLock { hasThread } }

    func asUnownedSerialExecutor() -> UnownedSerialExecutor { UnownedSerialExecutor(ordinary: self) }
}

/// Name the calling thread, for whoever looks at the process. On Linux, Foundation loses names that are set early, and Swift does
/// not import the C library's function.
func nameThread(_ name: String) {
    #if os(Linux)
    try? Data(name.utf8).write(to: URL(filePath: "/proc/thread-self/comm"))
    #else
    pthread_setname_np(name)
    #endif
}
