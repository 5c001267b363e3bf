package dev.lesonnx.app.model

import dev.lesonnx.Bundle
import dev.lesonnx.LesonnxError
import dev.lesonnx.LoadOptions
import dev.lesonnx.Model
import kotlinx.coroutines.CoroutineDispatcher
import kotlinx.coroutines.Job
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.job
import kotlinx.coroutines.sync.Mutex
import kotlinx.coroutines.sync.withLock
import kotlinx.coroutines.withContext
import java.io.IOException
import kotlin.coroutines.coroutineContext

/** How much of the experts may stay in memory. */
enum class MemoryChoice(val title: String) { AUTO("Automatic"), QUARTER("A quarter"), LEAST("The least") }

/** Which bundle is loaded. */
sealed interface HostState {
    data object Empty : HostState

    data class Loading(val name: String) : HostState

    /**
     * [expertBytes] is what the experts may take; [notes] are the library's own lines for the user. [whyNoPictures] is null where messages may
     * have pictures.
     */
    data class Ready(
        val name: String,
        val canChat: Boolean,
        val engine: String,
        val expertBytes: Long,
        val options: LoadOptions,
        val notes: List<String>,
        val whyNoPictures: String?,
    ) : HostState

    /** A benchmark has it. */
    data class Measuring(val name: String) : HostState

    data class Failed(val name: String, val message: String) : HostState
}

/**
 * Owns the one model that is loaded. Any thread may call; who uses the model does so in [use], one at a time.
 *
 * @param compute where loading and waiting are done; not the main thread.
 * @param open loads a bundle: what differs between Android and a plain JVM is in it.
 * @param attach ties a loaded model to the system's word on memory, until what it gives is closed.
 */
class ModelHost(
    private val compute: CoroutineDispatcher,
    private val attach: (Model) -> AutoCloseable? = { null },
    private val open: (Bundle, LoadOptions) -> Model,
) {
    private val mutableState = MutableStateFlow<HostState>(HostState.Empty)
    private val turn = Mutex()
    private var model: Model? = null
    private var attached: AutoCloseable? = null

    @Volatile
    private var user: Job? = null

    val state: StateFlow<HostState> = mutableState

    /** The bundle that is loaded, for whoever wants to load it again in another way. */
    @Volatile
    var bundle: Bundle? = null
        private set

    /** Ends what uses the model, frees what was loaded and loads [bundle]; the outcome is in [state]. */
    suspend fun load(name: String, bundle: Bundle, options: LoadOptions) = exclusively {
        mutableState.value = HostState.Loading(name)
        mutableState.value = try {
            free()
            val loaded = open(bundle, options)
            attached = attach(loaded)
            model = loaded
            this.bundle = bundle
            HostState.Ready(name, loaded.hasChat, loaded.engineName, loaded.expertBudgetBytes, options, loaded.notes, loaded.whyNoPictures)
        } catch (error: LesonnxError) {
            HostState.Failed(name, error.message.orEmpty())
        } catch (error: IOException) {
            HostState.Failed(name, error.message ?: error.toString())
        }
    }

    /** Gives [work] the loaded model; null where none is loaded. Whoever loads another one cancels it. */
    suspend fun <T> use(work: suspend (Model) -> T): T? = turn.withLock {
        user = coroutineContext.job
        try {
            withContext(compute) { model?.let { work(it) } }
        } finally {
            user = null
        }
    }

    /** Frees the loaded model of [name], lets [work] load others by [with], and leaves nothing loaded. */
    suspend fun <T> alone(name: String, work: suspend () -> T): T = exclusively {
        mutableState.value = HostState.Measuring(name)
        try {
            free()
            work()
        } finally {
            mutableState.value = HostState.Empty
        }
    }

    /** Loads a model for [work] alone, and closes it. Call within [alone]. */
    suspend fun <T> with(bundle: Bundle, options: LoadOptions, work: suspend (Model) -> T): T =
        open(bundle, options).use { work(it) }

    /** Frees everything. */
    suspend fun close() = exclusively {
        free()
        mutableState.value = HostState.Empty
    }

    private suspend fun <T> exclusively(work: suspend () -> T): T {
        user?.cancel()
        return turn.withLock { withContext(compute) { work() } }
    }

    private fun free() {
        attached?.close()
        model?.close()
        attached = null
        model = null
        bundle = null
    }
}
