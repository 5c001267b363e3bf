package dev.lesonnx.app.model

import dev.lesonnx.Bundle
import dev.lesonnx.LesonnxError
import dev.lesonnx.LoadOptions
import dev.lesonnx.speculative.NO_DRAFTER
import dev.lesonnx.store.BundleDownloader
import dev.lesonnx.store.BundleImporter
import dev.lesonnx.store.BundleSource
import dev.lesonnx.store.BundleStore
import dev.lesonnx.store.Fit
import dev.lesonnx.store.FitCheck
import dev.lesonnx.store.PausedDownload
import dev.lesonnx.store.RemoteBundle
import dev.lesonnx.store.StoredBundle
import kotlinx.coroutines.CancellationException
import kotlinx.coroutines.CoroutineDispatcher
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Job
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.update
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext
import java.io.IOException
import java.util.concurrent.atomic.AtomicLong

/** A bundle of the store, with how it fits this device; [fit] is null where it cannot be opened. */
data class BundleItem(val stored: StoredBundle, val fit: FitCheck?)

/** A bundle on its way in. [totalBytes] is null where it is not known, as of a picked file. */
data class ArrivalState(val name: String, val isDownload: Boolean, val doneBytes: Long, val totalBytes: Long?)

/** A bundle on a server that was looked at, for a decision. */
data class LookState(val url: String, val remote: RemoteBundle? = null, val fit: FitCheck? = null)

/** What the bundles screen shows. [bundles] is null until they were listed; [problem] is a line on what went wrong last. */
data class BundlesState(
    val bundles: List<BundleItem>? = null,
    val paused: List<PausedDownload> = emptyList(),
    val arrival: ArrivalState? = null,
    val look: LookState? = null,
    val memory: MemoryChoice = MemoryChoice.AUTO,
    val problem: String? = null,
)

/** The bundles of this device: they come by picker or download, are loaded and deleted. Call it from one thread. */
class BundlesModel(
    private val store: BundleStore,
    private val host: ModelHost,
    private val facts: DeviceFacts,
    private val scope: CoroutineScope,
    private val io: CoroutineDispatcher,
    private val downloader: BundleDownloader = BundleDownloader(store),
) {
    private val importer = BundleImporter(store)
    private val mutableState = MutableStateFlow(BundlesState())
    private var arriving: Job? = null

    val state: StateFlow<BundlesState> = mutableState

    fun refresh() {
        scope.launch { list() }
    }

    fun chooseMemory(choice: MemoryChoice) = mutableState.update { it.copy(memory = choice) }

    /** Asks a server what it has at [url]; the answer is in [BundlesState.look]. */
    fun look(url: String) {
        if (url.isBlank()) return
        val address = url.trim()
        mutableState.update { it.copy(look = LookState(address), problem = null) }
        scope.launch {
            val found = attempt { withContext(io) { downloader.look(address) } }
            mutableState.update { state ->
                if (state.look?.url != address) state
                else state.copy(look = found?.let { LookState(address, it, FitCheck.of(it, facts.device())) })
            }
        }
    }

    fun forgetLook() = mutableState.update { it.copy(look = null) }

    /** Fetches what was looked at. */
    fun download() {
        val look = mutableState.value.look ?: return
        val name = store.unusedName(look.url.trimEnd('/').substringAfterLast('/').substringBefore('?'))
        forgetLook()
        fetch(name, look.url)
    }

    fun resume(paused: PausedDownload) = fetch(paused.name, paused.url)

    fun discard(paused: PausedDownload) {
        scope.launch {
            withContext(io) { store.discard(paused.name) }
            list()
        }
    }

    private fun fetch(name: String, url: String) = arrive(name, isDownload = true) { progress ->
        downloader.download(name, url) { progress(it.doneBytes, it.totalBytes) }
    }

    /** Copies a bundle that a person picked; [wanted] is what it is called there. */
    fun import(wanted: String, source: BundleSource) {
        val name = store.unusedName(wanted.removeSuffix(".zip"))
        arrive(name, isDownload = false) { progress -> importer.import(name, source) { progress(it, null) } }
    }

    /** Breaks off what is arriving: a download can go on later. */
    fun cancelArrival() {
        arriving?.cancel()
    }

    private fun arrive(name: String, isDownload: Boolean, work: suspend ((Long, Long?) -> Unit) -> StoredBundle) {
        if (arriving?.isActive == true) return
        val lastShown = AtomicLong()
        mutableState.update { it.copy(arrival = ArrivalState(name, isDownload, 0, null), problem = null) }
        arriving = scope.launch {
            try {
                attempt {
                    withContext(io) {
                        work { done, total ->
                            // Blocks come by the thousand a second, from several threads.
                            val now = System.nanoTime()
                            val last = lastShown.get()
                            if (now - last >= PROGRESS_NS && lastShown.compareAndSet(last, now)) {
                                mutableState.update { it.copy(arrival = ArrivalState(name, isDownload, done, total)) }
                            }
                        }
                    }
                }
            } finally {
                mutableState.update { it.copy(arrival = null) }
                // Not the cancelled job's own work.
                scope.launch { list() }
            }
        }
    }

    /** Loads a bundle as the memory choice says. */
    fun open(item: BundleItem) {
        val bundle = item.stored.bundle ?: return
        val fit = item.fit ?: return
        val options = when (mutableState.value.memory) {
            MemoryChoice.AUTO -> LoadOptions(memoryBudgetBytes = fit.memoryBudgetBytes)
            MemoryChoice.QUARTER -> LoadOptions(expertBudgetBytes = maxOf(fit.needs.leastBudget, fit.needs.experts / 4))
            MemoryChoice.LEAST -> LoadOptions(expertBudgetBytes = fit.needs.leastBudget)
        }
        mutableState.update { it.copy(problem = null) }
        // A bundle that brings a drafter was made to use it.
        val draft = if (bundle.manifest.drafter == null) NO_DRAFTER else "dspark"
        scope.launch { host.load(item.stored.name, bundle, options.copy(draft = draft)) }
    }

    /** Deletes a bundle, freeing it first where it is loaded. */
    fun delete(item: BundleItem) {
        scope.launch {
            val loaded = host.state.value
            if (loaded is HostState.Ready && loaded.name == item.stored.name) host.close()
            attempt { withContext(io) { store.delete(item.stored.name) } }
            list()
        }
    }

    fun canOpen(item: BundleItem): Boolean =
        item.stored.bundle != null && item.fit != null && item.fit.fit != Fit.TOO_LITTLE_MEMORY

    private suspend fun list() {
        val (bundles, paused) = withContext(io) {
            store.list().map { BundleItem(it, it.bundle?.let { bundle -> fitOf(it, bundle) }) } to store.paused()
        }
        val arriving = mutableState.value.arrival?.name
        mutableState.update { it.copy(bundles = bundles, paused = paused.filter { one -> one.name != arriving }) }
    }

    private fun fitOf(stored: StoredBundle, bundle: Bundle): FitCheck =
        FitCheck.of(bundle.manifest, stored.files, facts.device(), isStored = true)

    /** Runs [work]; what goes wrong becomes the state's line, and null. */
    private suspend fun <T> attempt(work: suspend () -> T): T? = try {
        work()
    } catch (error: CancellationException) {
        throw error
    } catch (error: LesonnxError) {
        mutableState.update { it.copy(problem = error.message) }
        null
    } catch (error: IOException) {
        mutableState.update { it.copy(problem = error.message ?: error.toString()) }
        null
    }

    private companion object {
        const val PROGRESS_NS = 50_000_000L
    }
}
