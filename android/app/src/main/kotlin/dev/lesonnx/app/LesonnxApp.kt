package dev.lesonnx.app

import android.app.Application
import dev.lesonnx.Model
import dev.lesonnx.Platform
import dev.lesonnx.android.AndroidPlatform
import dev.lesonnx.app.model.BenchmarkModel
import dev.lesonnx.app.model.BundlesModel
import dev.lesonnx.app.model.ChatModel
import dev.lesonnx.app.model.ModelHost
import dev.lesonnx.app.model.TelemetryModel
import dev.lesonnx.store.BundleStore
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.SupervisorJob

/** The process: owns the models of all screens, which live on while activities come and go. */
open class LesonnxApp : Application() {
    lateinit var models: AppModels
        private set

    override fun onCreate() {
        super.onCreate()
        val store = BundleStore(filesDir.toPath().resolve("bundles"))
        models = AppModels(store, platform(), AndroidFacts(this, store.root.toFile()))
    }

    /** How this system reads files and loads libraries. */
    protected open fun platform(): Platform = AndroidPlatform(this)

    override fun onTrimMemory(level: Int) {
        super.onTrimMemory(level)
        models.trim(level)
    }
}

/** The models of the four screens, wired together. Belongs to the main thread. */
class AppModels(store: BundleStore, platform: Platform, facts: AndroidFacts) {
    private val scope = CoroutineScope(SupervisorJob() + Dispatchers.Main.immediate)

    // One thread: ONNX Runtime's own pool does the rest.
    val host = ModelHost(Dispatchers.Default.limitedParallelism(1)) { bundle, options -> Model.load(bundle, platform, options) }
    val telemetry = TelemetryModel()
    val bundles = BundlesModel(store, host, facts, scope, Dispatchers.IO)
    val chat = ChatModel(host, telemetry, facts, scope)
    val benchmark = BenchmarkModel(host, facts, scope)

    fun trim(level: Int) {}
}
