package dev.lesonnx.app.model

import dev.lesonnx.store.Device

/** What the device and this process are at a moment. Any thread may ask. */
interface DeviceFacts {
    /** Memory and storage, for a fit check. */
    fun device(): Device

    /** Resident memory of this process. */
    fun processBytes(): Long
}
