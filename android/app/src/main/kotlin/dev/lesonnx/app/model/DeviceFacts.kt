package dev.lesonnx.app.model

import dev.lesonnx.store.Device

/** What the device is at a moment. Any thread may ask. */
fun interface DeviceFacts {
    /** Memory and storage, for a fit check. */
    fun device(): Device
}
