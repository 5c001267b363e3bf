package dev.lesonnx.android

import android.content.ComponentCallbacks2
import android.content.Context
import android.content.res.Configuration
import dev.lesonnx.MemoryPressure

/**
 * Hands Android's trim callbacks to a [MemoryPressure] until closed. Call [foreground] when the app is seen again: Android tells
 * when memory gets scarce, never when it is plenty. Thread-safe.
 */
class TrimCallbacks(private val context: Context, private val pressure: MemoryPressure) : ComponentCallbacks2, AutoCloseable {
    init {
        context.applicationContext.registerComponentCallbacks(this)
    }

    /** The app is in front: experts may take their whole budget again. */
    fun foreground() = pressure.report(MemoryPressure.Level.NORMAL)

    override fun onTrimMemory(level: Int) = pressure.report(
        when {
            level >= ComponentCallbacks2.TRIM_MEMORY_BACKGROUND -> MemoryPressure.Level.CRITICAL
            level >= ComponentCallbacks2.TRIM_MEMORY_UI_HIDDEN -> MemoryPressure.Level.LOW
            level >= RUNNING_CRITICAL -> MemoryPressure.Level.CRITICAL
            level >= RUNNING_LOW -> MemoryPressure.Level.LOW
            else -> MemoryPressure.Level.MODERATE
        },
    )

    @Deprecated("Android calls it beside onTrimMemory", level = DeprecationLevel.HIDDEN)
    override fun onLowMemory() = pressure.report(MemoryPressure.Level.CRITICAL)

    override fun onConfigurationChanged(newConfig: Configuration) = Unit

    override fun close() = context.applicationContext.unregisterComponentCallbacks(this)

    private companion object {
        // Deprecated with API 34, which no longer sends them; older systems do.
        const val RUNNING_LOW = 10
        const val RUNNING_CRITICAL = 15
    }
}
