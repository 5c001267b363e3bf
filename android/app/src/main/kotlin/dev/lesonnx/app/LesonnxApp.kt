package dev.lesonnx.app

import android.app.Application
import android.content.Context
import dev.lesonnx.MemoryPressure
import dev.lesonnx.Model
import dev.lesonnx.Platform
import dev.lesonnx.android.AndroidPlatform
import dev.lesonnx.android.TrimCallbacks
import dev.lesonnx.app.model.BenchmarkModel
import dev.lesonnx.app.model.BundlesModel
import dev.lesonnx.app.model.ChatModel
import dev.lesonnx.app.model.HostState
import dev.lesonnx.app.model.ModelHost
import dev.lesonnx.app.model.TelemetryModel
import dev.lesonnx.store.BundleStore
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.SupervisorJob
import kotlinx.coroutines.launch

/** The process: owns the models of all screens, which live on while activities come and go. */
open class LesonnxApp : Application() {
    lateinit var models: AppModels
        private set

    override fun onCreate() {
        super.onCreate()
        models = AppModels(this, platform())
    }

    /** How this system reads files and loads libraries. */
    protected open fun platform(): Platform = AndroidPlatform(applicationInfo.nativeLibraryDir)

    override fun onTrimMemory(level: Int) {
        super.onTrimMemory(level)
        models.trimmed(level)
    }
}

/** The models of the four screens, wired together. Belongs to the main thread. */
class AppModels(context: Context, platform: Platform) {
    private val scope = CoroutineScope(SupervisorJob() + Dispatchers.Main.immediate)
    private val store = BundleStore(context.filesDir.toPath().resolve("bundles"))
    private val facts = AndroidFacts(context, platform, store.root.toFile())
    private var trim: TrimCallbacks? = null

    val host = ModelHost(
        compute = Dispatchers.Default,
        attach = { model -> TrimCallbacks(context, MemoryPressure(model)).also { trim = it } },
        open = { bundle, options -> Model.load(bundle, platform, options) },
    )
    val telemetry = TelemetryModel()
    val bundles = BundlesModel(store, host, facts, scope, Dispatchers.IO)
    val chat = ChatModel(host, telemetry, scope)
    val benchmark = BenchmarkModel(host, scope)

    init {
        scope.launch {
            host.state.collect { state ->
                if (state is HostState.Ready) telemetry.reset(state.expertBytes, host.bundle?.expertBytes ?: 0)
            }
        }
    }

    /** The app is seen again: what was given back under pressure may come back. */
    fun foreground() {
        trim?.foreground()
    }

    /** Android has asked for memory; [TrimCallbacks] gives it, this says so. */
    fun trimmed(level: Int) {
        if (host.state.value is HostState.Ready) telemetry.event("Android asked for memory (level $level): experts gave some back")
    }
}
