package dev.lesonnx

import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Job
import kotlinx.coroutines.SupervisorJob
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.joinAll
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking
import java.nio.FloatBuffer
import java.util.concurrent.locks.ReentrantLock
import kotlin.concurrent.withLock

/** Gives router scores [T,E] of the next MoE layer from what is known; `ready` [T,k] says by 1 which rows are written. */
internal typealias LookaheadRun = (ready: ByteArray) -> FloatBuffer

/**
 * Runs layers of experts: carries the scheduler's actions out with coroutines that read and a computing thread.
 *
 * It decides nothing itself. [runLayer] and the other methods belong to the thread that computes, but for [telemetry]. The
 * scheduler is called under one lock, by the computing thread and by a reader that has finished a load, so that the next
 * read starts at once even while a dense part computes. Owns the engine; close it to end threads and free experts.
 */
internal class ExpertLoader(
    bundle: Bundle,
    val engine: ExpertEngine,
    config: SchedulerConfig,
    budgetBytes: Long,
    numLoaders: Int,
) : AutoCloseable {
    private val scheduler = Scheduler(layerShapes(bundle), budgetBytes, config)
    private val experts = bundle.experts

    /** What the cache may take now. */
    @Volatile
    var expertBudgetBytes = budgetBytes
        private set
    val usesLookahead = config.lookahead
    val keepsAll = config.resident

    private val lock = ReentrantLock()
    private val changed = lock.newCondition()

    // All below is guarded by the lock.
    private val batches = ArrayDeque<IntArray>()
    private val underWay = HashMap<Int, Action.Load>()
    private var failure: LesonnxError? = null
    private var unanswered = 0
    private var predictionFailure: Throwable? = null
    private var counts = Counts()

    private val loads = Channel<Action.Load>(Channel.UNLIMITED)
    private val questions = Channel<Question>(Channel.UNLIMITED)
    private val workers = Workers("lesonnx loader", numLoaders + if (usesLookahead) 1 else 0)
    private val jobs: List<Job>

    private class Question(val place: Int, val lookahead: LookaheadRun, val ready: ByteArray)

    /** What [Telemetry] shows beside the scheduler's counters; times in nanoseconds. */
    private class Counts {
        var loads = 0L
        var readBytes = 0L
        var readNs = 0L
        var stallNs = 0L
        var expertNs = 0L
        var lookaheadNs = 0L
        var scheduleNs = 0L
        var denseNs = 0L
    }

    init {
        engine.resize(slabLengths())
        val scope = CoroutineScope(workers.dispatcher + SupervisorJob())
        jobs = List(numLoaders) { scope.launch { for (load in loads) read(load) } } +
            List(if (usesLookahead) 1 else 0) { scope.launch { for (question in questions) answer(question) } }
    }

    // ---- the computing thread

    /** A step of that many rows begins, the last [numDrafts] of which may be rejected. */
    fun beginStep(numRows: Int, numDrafts: Int = 0) = lock.withLock {
        failure?.let { throw it }
        carryOut(scheduler.beginStep(numRows, numDrafts))
    }

    /** Of the step's rows these stay; what only rejected drafts touched is no use. */
    fun accept(rows: IntArray) = lock.withLock { carryOut(scheduler.accept(rows)) }

    /** For each of the next step's rows the bytes that it is expected to add to what must be loaded. */
    fun expectedNewBytes(numRows: Int): LongArray = lock.withLock { scheduler.expectedNewBytes(numRows) }

    /** The number of the first expert of MoE layer number [place]. */
    fun first(place: Int): Int = scheduler.first(place)

    /**
     * Loads and computes what MoE layer number [place] requires; [LoadError] where an expert cannot be read.
     *
     * [beforeExperts] runs while the first loads are under way: what makes the experts' input of a layer whose router has
     * spoken before. A layer that is broken off by an error leaves experts half loaded: nothing runs after it.
     */
    fun runLayer(place: Int, work: LayerWork, lookahead: LookaheadRun?, beforeExperts: (() -> Unit)? = null) {
        try {
            carryLayerOut(place, work, lookahead, beforeExperts)
        } catch (error: Throwable) {
            lock.withLock { failure = failure ?: LesonnxError("a step was broken off; load the bundle again", error) }
            throw error
        }
    }

    /**
     * Carries a layer out. The next one is predicted twice: before any expert has run, so that reading starts early, and again
     * when those in memory have, which sees better. A coroutine of its own does that, while this thread computes.
     */
    private fun carryLayerOut(place: Int, work: LayerWork, lookahead: LookaheadRun?, beforeExperts: (() -> Unit)?) {
        awaitPredictions()
        var began = System.nanoTime()
        lock.withLock {
            carryOut(scheduler.route(place, work.topkIds))
            counts.scheduleNs += System.nanoTime() - began
        }
        if (beforeExperts != null) {
            began = System.nanoTime()
            beforeExperts()
            tookDense(System.nanoTime() - began)
        }
        var left = work.numUsed + if (scheduler.layers[place].sharedCostBytes > 0) 1 else 0
        val ready = ByteArray(work.numRows * work.slots)
        if (lookahead != null) foresee(place + 1, lookahead, ready)
        var sharpened = lookahead == null
        while (left > 0) {
            val batch = nextBatch()
            began = System.nanoTime()
            engine.compute(batch, work)
            val computed = System.nanoTime()
            lock.withLock {
                carryOut(scheduler.computed(batch))
                counts.expertNs += computed - began
                counts.scheduleNs += System.nanoTime() - computed
            }
            left -= batch.size
            if (!sharpened && lookahead != null) {
                sharpened = true
                markReady(ready, batch, work)
                foresee(place + 1, lookahead, ready)
            }
        }
        lock.withLock { carryOut(scheduler.endLayer()) }
    }

    private fun markReady(ready: ByteArray, batch: IntArray, work: LayerWork) {
        for (number in batch) {
            if (experts[number].expertIdx == null) continue
            for (index in 0 until work.numRowsOf(number)) ready[work.place(number, index)] = 1
        }
    }

    /** Has the layer predicted by the coroutine for it, while this thread goes on computing. */
    private fun foresee(place: Int, lookahead: LookaheadRun, ready: ByteArray) {
        lock.withLock { unanswered++ }
        questions.trySend(Question(place, lookahead, ready.copyOf()))
    }

    /** Waits for what was asked: a prediction may not come after its layer's router has spoken. */
    private fun awaitPredictions() = lock.withLock {
        if (unanswered > 0) {
            val began = System.nanoTime()
            while (unanswered > 0) changed.awaitUninterruptibly()
            counts.lookaheadNs += System.nanoTime() - began
        }
        predictionFailure?.let {
            predictionFailure = null
            throw it
        }
    }

    /** What is to be computed next; waits for reads where nothing is. */
    private fun nextBatch(): IntArray = lock.withLock {
        if (batches.isEmpty()) {
            val began = System.nanoTime()
            while (batches.isEmpty() && failure == null) changed.awaitUninterruptibly()
            counts.stallNs += System.nanoTime() - began
        }
        failure?.let { throw it }
        batches.removeFirst()
    }

    /** Another expert budget, between two steps. [BudgetError] where it is too small; nothing changes then. */
    fun pressure(expertBudgetBytes: Long): Unit = lock.withLock {
        failure?.let { throw it }
        carryOut(scheduler.pressure(expertBudgetBytes))
        while (failure == null && !(scheduler.committedBytes() <= expertBudgetBytes && allInside())) changed.awaitUninterruptibly()
        failure?.let { throw it }
        this.expertBudgetBytes = expertBudgetBytes
        try {
            engine.resize(slabLengths())
        } catch (error: LesonnxError) {
            failure = error
            throw error
        }
    }

    /** Whether no read under way goes beyond the slabs' ends. */
    private fun allInside(): Boolean {
        if (underWay.isEmpty()) return true
        val lengths = slabLengths()
        return underWay.values.all { it.offsetBytes + experts[it.expert].costBytes <= lengths[it.slab] }
    }

    /** A dense part took that long. */
    fun tookDense(nanoseconds: Long) = lock.withLock { counts.denseNs += nanoseconds }

    // ---- any thread

    /** Counts and times since the last reset. */
    val telemetry: Telemetry
        get() = lock.withLock {
            val counters = scheduler.counters
            Telemetry(
                loads = counts.loads,
                hits = counters.hits,
                late = counters.late,
                misses = counters.misses,
                readBytes = counts.readBytes,
                lookaheadLoads = counters.lookaheadLoads,
                lookaheadUsed = counters.lookaheadUsed,
                lookaheadWasted = counters.lookaheadWasted,
                readMs = counts.readNs / NS_PER_MS,
                stallMs = counts.stallNs / NS_PER_MS,
                expertMs = counts.expertNs / NS_PER_MS,
                lookaheadMs = counts.lookaheadNs / NS_PER_MS,
                scheduleMs = counts.scheduleNs / NS_PER_MS,
                denseMs = counts.denseNs / NS_PER_MS,
            )
        }

    /** Begins to count anew. */
    fun resetTelemetry() = lock.withLock {
        counts = Counts()
        scheduler.counters = Counters()
    }

    /** Ends the readers once their reads have, then frees all experts. */
    override fun close() {
        loads.close()
        questions.close()
        runBlocking { jobs.joinAll() }
        workers.close()
        engine.close()
    }

    // ---- under the lock

    /** Hands actions on. */
    private fun carryOut(actions: List<Action>) {
        for (action in actions) {
            when (action) {
                is Action.Load -> {
                    underWay[action.expert] = action
                    loads.trySend(action)
                }
                is Action.Evict -> engine.evict(experts[action.expert])
                is Action.Compute -> {
                    batches.addLast(action.experts)
                    changed.signalAll()
                }
                is Action.Promote, is Action.Cancel -> Unit
            }
        }
    }

    private fun slabLengths(): LongArray = scheduler.slabs().let { slabs -> LongArray(slabs.size) { slabs[it].lengthBytes.toLong() } }

    // ---- the readers

    private fun read(load: Action.Load) {
        val expert = experts[load.expert]
        val began = System.nanoTime()
        var problem: Throwable? = null
        var numBytes = 0L
        try {
            numBytes = engine.load(expert, load.slab, load.offsetBytes.toLong())
        } catch (error: Throwable) { // whatever it is, the computing thread must hear of it
            problem = error
        }
        val readNs = System.nanoTime() - began
        lock.withLock {
            underWay.remove(load.expert)
            try {
                if (problem == null) {
                    counts.loads++
                    counts.readBytes += numBytes
                    counts.readNs += readNs
                    carryOut(scheduler.loaded(load.expert, readNs / NS_PER_US))
                } else {
                    carryOut(scheduler.loadFailed(load.expert))
                }
            } catch (_: LesonnxError) {
                failure = LoadError("$expert cannot be loaded: ${problem?.message ?: problem}", problem)
            }
            changed.signalAll()
        }
    }

    /**
     * One prediction. What it reads may be half written: rows of experts that are not `ready` are left out, and a shared
     * expert's only makes the prediction a little better or worse. Nothing but loading depends on it.
     */
    private fun answer(question: Question) {
        var problem: Throwable? = null
        try {
            val scores = fixedScores(question.lookahead(question.ready))
            lock.withLock { carryOut(scheduler.predict(question.place, scores)) }
        } catch (error: Throwable) { // whatever it is, the computing thread must hear of it
            problem = error
        }
        lock.withLock {
            unanswered--
            predictionFailure = predictionFailure ?: problem
            changed.signalAll()
        }
    }

    companion object {
        private const val NS_PER_MS = 1e6
        private const val NS_PER_US = 1000L

        /** The scheduler's view of a bundle: counts and costs, layer by layer. */
        fun layerShapes(bundle: Bundle): List<LayerShape> {
            val kinds = bundle.manifest.expertKinds
            return bundle.manifest.expertLayers.map { layer ->
                val shared = layer.sharedKind?.let { kinds[it].costBytes } ?: 0L
                LayerShape(layer.numExperts, layer.numExpertsPerTok, kinds[layer.kind].costBytes, shared)
            }
        }
    }
}
