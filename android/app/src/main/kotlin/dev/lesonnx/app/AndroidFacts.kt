package dev.lesonnx.app

import android.app.ActivityManager
import android.content.Context
import dev.lesonnx.app.model.DeviceFacts
import dev.lesonnx.store.Device
import java.io.File
import java.io.IOException

/** What Android and the kernel say of memory and storage. Thread-safe. */
class AndroidFacts(context: Context, private val storage: File) : DeviceFacts {
    private val activities = context.getSystemService(ActivityManager::class.java)

    override fun device(): Device {
        val memory = ActivityManager.MemoryInfo()
        activities.getMemoryInfo(memory)
        // Under the threshold Android begins to kill processes.
        val available = (memory.availMem - memory.threshold).coerceAtLeast(0)
        return Device(memory.totalMem, available, processBytes(), storage.usableSpace)
    }

    override fun processBytes(): Long = try {
        val resident = File("/proc/self/statm").readText().split(' ')[1].toLong()
        resident * PAGE_BYTES
    } catch (_: IOException) {
        0
    }

    private companion object {
        val PAGE_BYTES: Long = android.system.Os.sysconf(android.system.OsConstants._SC_PAGESIZE)
    }
}
