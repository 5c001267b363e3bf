package dev.lesonnx.app

import android.app.ActivityManager
import android.content.Context
import dev.lesonnx.Memory
import dev.lesonnx.Platform
import dev.lesonnx.app.model.DeviceFacts
import dev.lesonnx.store.Device
import java.io.File

/** What Android and the kernel say of memory and storage. Thread-safe. */
class AndroidFacts(context: Context, private val platform: Platform, private val storage: File) : DeviceFacts {
    private val activities = context.getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager

    override fun device(): Device {
        val memory = ActivityManager.MemoryInfo()
        activities.getMemoryInfo(memory)
        // Under the threshold Android begins to kill processes.
        val available = (memory.availMem - memory.threshold).coerceAtLeast(0)
        return Device(memory.totalMem, available, Memory.currentBytes(), platform.heapGrowthBytes(), storage.usableSpace)
    }
}
