package dev.lesonnx.app

import org.junit.runners.model.FrameworkMethod
import org.robolectric.RobolectricTestRunner
import org.robolectric.internal.bytecode.InstrumentationConfiguration

/** Robolectric, with the libraries that load native code left to the test's own class loader: a process may load them once. */
class LesonnxRunner(testClass: Class<*>) : RobolectricTestRunner(testClass) {
    override fun createClassLoaderConfig(method: FrameworkMethod): InstrumentationConfiguration =
        InstrumentationConfiguration.Builder(super.createClassLoaderConfig(method))
            .doNotAcquirePackage("ai.onnxruntime.")
            .doNotAcquirePackage("ai.djl.")
            .build()
}
