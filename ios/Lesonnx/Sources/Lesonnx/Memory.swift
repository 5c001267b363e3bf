import Foundation

/// What the system says of this process's memory.
public enum Memory {
    /// Memory that counts against this process now: resident on Linux, the footprint by which iOS ends apps on Apple systems.
    public static func currentBytes() -> Int {
        #if os(Linux)
        return status("VmRSS")
        #else
        return Int(taskInfo()?.phys_footprint ?? 0)
        #endif
    }

    /// The most it was so far.
    public static func peakBytes() -> Int {
        #if os(Linux)
        return status("VmHWM")
        #else
        return Int(taskInfo()?.ledger_phys_footprint_peak ?? 0)
        #endif
    }

    #if os(Linux)
    /// A line of /proc/self/status in bytes; 0 where the system has none.
    private static func status(_ key: String) -> Int {
        guard let text = try? String(contentsOfFile: "/proc/self/status", encoding: .utf8) else { return 0 }
        for line in text.split(separator: "\n") where line.hasPrefix(key + ":") {
            let number = line.split(whereSeparator: \.isWhitespace).dropFirst().first.flatMap { Int($0) }
            return (number ?? 0) * 1024
        }
        return 0
    }
    #else
    private static func taskInfo() -> task_vm_info_data_t? {
        var info = task_vm_info_data_t()
        var count = mach_msg_type_number_t(MemoryLayout<task_vm_info_data_t>.size / MemoryLayout<integer_t>.size)
        let result = withUnsafeMutablePointer(to: &info) { pointer in
            pointer.withMemoryRebound(to: integer_t.self, capacity: Int(count)) { integers in
                task_info(mach_task_self_, task_flavor_t(TASK_VM_INFO), integers, &count)
            }
        }
        return result == KERN_SUCCESS ? info : nil
    }
    #endif
}
