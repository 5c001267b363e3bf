package dev.lesonnx.app.model

import dev.lesonnx.Bundle
import dev.lesonnx.LesonnxError
import dev.lesonnx.LoadOptions
import dev.lesonnx.Model
import kotlinx.coroutines.CoroutineDispatcher
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.sync.Mutex
import kotlinx.coroutines.sync.withLock
import kotlinx.coroutines.withContext

/** How much of the experts may stay in memory. */
enum class MemoryChoice(val title: String) { AUTO("Automatic"), QUARTER("A quarter"), LEAST("The least") }

/** Which bundle is loaded. */
sealed interface HostState {
    data object Empty : HostState

    data class Loading(val name: String) : HostState

    /** [expertBytes] is what the experts may take; [notes] are the library's own lines for the user. */
    data class Ready(
        val name: String,
        val canChat: Boolean,
        val engine: String,
        val expertBytes: Long,
        val options: LoadOptions,
        val notes: List<String>,
    ) : HostState

    data class Failed(val name: String, val message: String) : HostState
}

/**
 * Owns the one model that is loaded. A model belongs to one thread at a time: whoever uses it does so in [use].
 *
 * @param open loads a bundle; what differs between Android and a plain JVM is in it.
 */
class ModelHost(
    private val compute: CoroutineDispatcher,
    private val open: (Bundle, LoadOptions) -> Model,
) {
    private val mutableState = MutableStateFlow<HostState>(HostState.Empty)
    private val turn = Mutex()
    private var model: Model? = null

    val state: StateFlow<HostState> = mutableState

    /** The bundle that is loaded, for whoever wants to load it again in another way. */
    var bundle: Bundle? = null
        private set

    /** Frees what was loaded and loads [bundle]; the outcome is in [state]. Waits until nobody uses the old model. */
    suspend fun load(name: String, bundle: Bundle, options: LoadOptions) = turn.withLock {
        mutableState.value = HostState.Loading(name)
        mutableState.value = withContext(compute) {
            try {
                free()
                val loaded = open(bundle, options)
                model = loaded
                this@ModelHost.bundle = bundle
                ready(name, loaded, options)
            } catch (error: LesonnxError) {
                HostState.Failed(name, error.message.orEmpty())
            }
        }
    }

    /** Gives [work] the loaded model, on the thread that computes; null where none is loaded. One at a time. */
    suspend fun <T> use(work: suspend (Model) -> T): T? = turn.withLock {
        withContext(compute) { model?.let { work(it) } }
    }

    /** Frees the loaded model, runs [work] on the thread that computes, and leaves nothing loaded. */
    suspend fun <T> alone(work: suspend () -> T): T = turn.withLock {
        withContext(compute) {
            free()
            mutableState.value = HostState.Empty
            work()
        }
    }

    /** Loads a model for [work] alone, and closes it. Call within [alone]. */
    suspend fun <T> with(bundle: Bundle, options: LoadOptions, work: suspend (Model) -> T): T =
        open(bundle, options).use { work(it) }

    /** Frees everything. */
    suspend fun close() = alone { }

    private fun free() {
        model?.close()
        model = null
        bundle = null
    }

    private fun ready(name: String, model: Model, options: LoadOptions) = HostState.Ready(
        name = name,
        canChat = model.canChat,
        engine = model.engineName,
        expertBytes = model.expertBudgetBytes,
        options = options,
        notes = model.notes,
    )
}
