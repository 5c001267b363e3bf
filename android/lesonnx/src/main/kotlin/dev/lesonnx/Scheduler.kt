package dev.lesonnx

/** Where an expert is: not in memory, waiting for its read, being read, in memory. */
enum class ExpertState { ABSENT, QUEUED, LOADING, RESIDENT }

/**
 * The expert scheduler: events in, actions out. What to load, where to, what to evict, what to compute when.
 *
 * Experts are numbered layer by layer: its routed experts, then its shared one. A step is [beginStep], then for each layer in
 * order [route], ([loaded] and [computed] as they come, until all required experts are computed), [endLayer]. [predict] may
 * come at any time, [accept] after the last layer, [pressure] best between steps. Each returns the actions it causes, in
 * order; `docs/scheduler.md` says what a host can rely on.
 *
 * It knows no threads, clock, files or ONNX Runtime. Everything is integers and every tie is broken by index, so it replays
 * the golden traces of the Python scheduler. Not thread-safe: the host calls it from one thread at a time.
 *
 * @throws BudgetError for a budget below the largest layer's experts of one row
 */
class Scheduler(
    val layers: List<LayerShape>,
    budgetBytes: Long,
    val config: SchedulerConfig = SchedulerConfig(),
) {
    /** Totals since the start, or since the host put new ones here. */
    var counters = Counters()

    private val residency: Residency
    private val lookahead: Lookahead
    private val lookaheadCap: Long
    private val state: Array<ExpertState>

    private var clock = 0 // layer visits so far
    private val lastVisit = IntArray(layers.size) { it + 1 - layers.size } // as if a cycle had just ended
    private var rows = 0
    private var drafts = 0
    private val draftRows = Array(layers.size) { emptyArray<IntArray>() }
    private val required: BooleanArray // of the open layer, not yet computed
    private var numRequired = 0
    private val ready = IntList() // resident, required, not given out to compute
    private val computing: BooleanArray
    private var numComputing = 0
    private val demand = IntList() // queued, in the order of loading
    private val wanted = IntList() // queued for lookahead, nearest layer first, then best rank; in order of loading
    private val ahead: BooleanArray // loaded or loading ahead of its layer's visit
    private val loads: LoadsUnderWay
    private var speculativeBytes = 0L // queued and loading
    private val failedOnce: BooleanArray
    private var preload: Int

    init {
        require(!(config.resident || config.lookahead) || config.retain) { "resident experts and lookahead need retain" }
        require(config.maxLoads > 0 && layers.isNotEmpty()) { "a scheduler needs a layer and a load under way" }
        checkBudget(budgetBytes)
        val total = layers.sumOf { it.numExperts * it.costBytes + it.sharedCostBytes }
        if (config.resident && budgetBytes < total) {
            throw BudgetError("expert budget of $budgetBytes bytes: all experts in memory need $total")
        }
        residency = Residency(layers, budgetBytes, config.policy, config.slabBytes)
        lookahead = Lookahead(
            IntArray(layers.size) { layers[it].numExperts },
            IntArray(layers.size) { layers[it].numExpertsPerTok },
        )
        lookaheadCap = if (config.lookaheadBytes > 0) config.lookaheadBytes else 8 * layers.maxOf { it.costBytes }
        val count = residency.cost.size
        state = Array(count) { ExpertState.ABSENT }
        required = BooleanArray(count)
        computing = BooleanArray(count)
        ahead = BooleanArray(count)
        loads = LoadsUnderWay(count)
        failedOnce = BooleanArray(count)
        preload = if (config.resident) 0 else count
    }

    // ---- what a host may ask

    /** Experts of all layers together. */
    val numExperts: Int get() = state.size

    /** The layer between [route] and [endLayer]; -1 if there is none. */
    var openLayer = -1
        private set

    /** How far speculation is turned up, 0 to 64. */
    val lookaheadLevel: Int get() = lookahead.level

    /** The number of a layer's first expert. */
    fun first(layer: Int): Int = residency.first[layer]

    fun state(expert: Int): ExpertState = state[expert]

    /** The slab of a loading or resident expert. */
    fun slab(expert: Int): Int = residency.slab(expert)

    /** The byte offset of a loading or resident expert in its slab. */
    fun offsetBytes(expert: Int): Int = residency.offsetBytes(expert)

    /** The cache's buffers by number; lengths shrink and return with [pressure]. */
    fun slabs(): List<Slab> = residency.slabs()

    /**
     * What the slots in force take, and those given up whose expert is still needed; at most the budget once nothing is
     * required and nothing is loading.
     */
    fun committedBytes(): Long = residency.committedBytes()

    /** For each of the next step's [rows] the bytes that it is expected to add to what must be loaded. */
    fun expectedNewBytes(rows: Int): LongArray = residency.expectedNewBytes(rows) { state[it] != ExpertState.RESIDENT }

    // ---- events

    /** A step of [rows] tokens begins, the last [drafts] of which may be rejected (see [accept]). */
    fun beginStep(rows: Int, drafts: Int = 0): List<Action> {
        if (openLayer >= 0) throw ScheduleError("beginStep while layer $openLayer is open")
        if (drafts < 0 || drafts >= rows) throw ScheduleError("beginStep of $rows rows with $drafts drafts")
        this.rows = rows
        this.drafts = drafts
        draftRows.fill(emptyArray())
        return advance(ArrayList())
    }

    /**
     * The router's choice: for each row (the last rows of the step, where a layer computes fewer) its experts, strongest
     * first. The arrays stay the caller's.
     */
    fun route(layer: Int, expertIds: Array<IntArray>): List<Action> {
        if (openLayer >= 0 || expertIds.size !in 1..rows || layer !in layers.indices) {
            throw ScheduleError("route of layer $layer: ${expertIds.size} rows of $rows, open $openLayer")
        }
        val shape = layers[layer]
        val first = first(layer)
        val routing = Routing(shape, expertIds)
        if (!routing.isPossible()) {
            throw ScheduleError(
                "route of layer $layer: a row names up to ${shape.numExpertsPerTok} experts below ${shape.numExperts}",
            )
        }
        val used = routing.used()
        for (expertIdx in used) required[first + expertIdx] = true
        numRequired = used.size
        if (shape.sharedCostBytes > 0) {
            required[first + shape.numExperts] = true
            numRequired++
        }
        openLayer = layer
        clock++
        lastVisit[layer] = clock
        val certain = maxOf(0, expertIds.size - drafts)
        if (drafts > 0) draftRows[layer] = Array(expertIds.size - certain) { expertIds[certain + it].copyOf() }
        if (certain > 0) residency.policy.learn(layer, expertIds, 0, certain)
        residency.revalue(layer, clock, required)

        val actions = ArrayList<Action>()
        if (config.lookahead) {
            lookahead.observe(layer, used)
            settleSpeculation(layer, actions)
        }
        for (expertIdx in used) require(first + expertIdx, actions)
        if (shape.sharedCostBytes > 0) require(first + shape.numExperts, actions)
        return advance(actions)
    }

    private fun require(expert: Int, actions: MutableList<Action>) {
        when (state[expert]) {
            ExpertState.RESIDENT -> {
                counters.hits++
                ready.add(expert)
            }
            ExpertState.LOADING -> {
                counters.late++
                if (loads.promote(expert)) {
                    speculativeBytes -= residency.cost[expert]
                    actions.add(Action.Promote(expert))
                }
            }
            else -> {
                counters.misses++
                state[expert] = ExpertState.QUEUED
                demand.add(expert)
            }
        }
    }

    /** Fixed-point router scores [T,E] (see [fixedScores]) for the layer's next visit; they replace the last. */
    fun predict(layer: Int, scores: IntArray): List<Action> {
        if (layer == openLayer || layer !in layers.indices) {
            throw ScheduleError("predict for layer $layer while layer $openLayer is open")
        }
        val n = layers[layer].numExperts
        if (scores.isEmpty() || scores.size % n != 0) {
            throw ScheduleError("predict for layer $layer: ${scores.size} scores, expected rows of $n")
        }
        if (!config.lookahead) return emptyList()
        val actions = ArrayList<Action>()
        val old = queuedAhead(layer)
        for (expert in old) unqueue(expert)
        val new = admit(layer, scores)
        for (expert in old) if (state[expert] == ExpertState.ABSENT) actions.add(Action.Cancel(expert))
        if (new.size == 0) return actions
        val visit = nextVisit(layer)
        var place = 0
        while (place < wanted.size && nextVisit(residency.layerOf[wanted[place]]) <= visit) place++
        for (index in 0 until new.size) wanted.insert(place + index, new[index])
        return advance(actions)
    }

    /** The expert is in its place; reading it took [readUs] microseconds. */
    fun loaded(expert: Int, readUs: Long): List<Action> {
        endLoad(expert)
        state[expert] = ExpertState.RESIDENT
        failedOnce[expert] = false
        val timing = loads.takeTiming(expert)
        if (timing != LoadsUnderWay.Timing.NONE) {
            val beside = timing == LoadsUnderWay.Timing.BESIDE_SPECULATION
            lookahead.demandRead(residency.cost[expert], readUs, beside)
        }
        val actions = ArrayList<Action>()
        if (required[expert]) ready.add(expert) else letGo(expert, actions)
        return advance(actions)
    }

    /**
     * The read failed. A required expert is read once more, to the same place; a mere prediction is dropped.
     *
     * @throws LoadError when an expert fails for the second time in a row
     */
    fun loadFailed(expert: Int): List<Action> {
        val kind = endLoad(expert)
        if (kind == LoadKind.LOOKAHEAD) {
            free(expert)
            return advance(arrayListOf(Action.Cancel(expert)))
        }
        if (failedOnce[expert]) {
            free(expert)
            val layer = residency.layerOf[expert]
            throw LoadError("expert ${expert - first(layer)} of MoE layer $layer could not be read, twice")
        }
        failedOnce[expert] = true
        loads.repeat(expert)
        return listOf(Action.Load(expert, false, slab(expert), offsetBytes(expert)))
    }

    /** These experts' rows are written: they are no longer required. All of a batch, or part by part. */
    fun computed(experts: IntArray): List<Action> {
        if (!experts.all { it in computing.indices && computing[it] }) {
            val out = computing.indices.filter { computing[it] }
            throw ScheduleError("computed ${experts.asList()}: being computed are $out")
        }
        for (expert in experts) {
            computing[expert] = false
            required[expert] = false
        }
        numComputing -= experts.size
        numRequired -= experts.size
        val actions = ArrayList<Action>()
        for (expert in experts) letGo(expert, actions)
        return advance(actions)
    }

    /** The open layer is done. */
    fun endLayer(): List<Action> {
        if (openLayer < 0 || numRequired > 0) {
            throw ScheduleError("endLayer of layer $openLayer while $numRequired experts are required")
        }
        openLayer = -1
        return emptyList()
    }

    /** Of the step's rows these stay (ascending); what only rejected drafts used teaches the policy nothing. */
    fun accept(rows: IntArray): List<Action> {
        if (openLayer >= 0 || rows.any { it !in 0 until this.rows }) {
            throw ScheduleError("accept of rows ${rows.asList()} of ${this.rows} while layer $openLayer is open")
        }
        for (layer in layers.indices) {
            val drafts = draftRows[layer]
            val before = this.rows - drafts.size
            val kept = rows.filter { it >= before }.map { drafts[it - before] }.toTypedArray()
            if (kept.isNotEmpty()) {
                residency.policy.learn(layer, kept, 0, kept.size)
                residency.revalue(layer, lastVisit[layer], required)
            }
            draftRows[layer] = emptyArray()
        }
        return emptyList()
    }

    /**
     * A new budget, at most the first one: experts beyond it are evicted, those still needed as soon as possible.
     *
     * @throws BudgetError for a budget below the largest layer's experts of one row, changing nothing
     */
    fun pressure(budgetBytes: Long): List<Action> {
        checkBudget(budgetBytes)
        val actions = ArrayList<Action>()
        for (expert in residency.resize(budgetBytes)) evict(expert, actions)
        return advance(actions)
    }

    private fun checkBudget(budgetBytes: Long) {
        val least = layers.maxOf { it.numExpertsPerTok * it.costBytes + it.sharedCostBytes }
        if (budgetBytes < least) {
            throw BudgetError("expert budget of $budgetBytes bytes: at least $least are needed")
        }
    }

    // ---- loads

    /** Start what may start, then give out what is ready; the common end of every event. */
    private fun advance(actions: MutableList<Action>): List<Action> {
        startLoads(actions)
        val complete = config.computeFirst || ready.size == numRequired || loads.count == 0
        if (ready.size > 0 && numComputing == 0 && complete) {
            val batch = ready.toIntArray()
            ready.clear()
            for (expert in batch) computing[expert] = true
            numComputing = batch.size
            actions.add(Action.Compute(batch))
        }
        return actions
    }

    private fun startLoads(actions: MutableList<Action>) {
        while (loads.count < config.maxLoads) {
            if (demand.size > 0) {
                // Everything in memory may be required: then wait until some of it is computed.
                if (!start(demand[0], NONE, LoadKind.DEMAND, actions)) return
                demand.removeAt(0)
            } else if (wanted.size > 0 && loads.numSpeculative < config.lookaheadLoads) {
                val expert = wanted[0]
                // Strictly more in value: a prediction must not push out its equal, loaded a moment ago.
                if (start(expert, residency.entry[expert] and INDEX_MASK.inv(), LoadKind.LOOKAHEAD, actions)) {
                    wanted.removeAt(0)
                } else {
                    unqueue(expert)
                    actions.add(Action.Cancel(expert))
                }
            } else if (preload < numExperts) {
                val expert = preload++
                if (state[expert] == ExpertState.ABSENT) start(expert, NONE, LoadKind.DEMAND, actions)
            } else {
                return
            }
        }
    }

    /** Load the expert if there is a free slot, or one whose expert's entry is below [worth]. */
    private fun start(expert: Int, worth: Long, kind: LoadKind, actions: MutableList<Action>): Boolean {
        val victim = residency.worst(expert)
        if (victim >= worth) return false
        if (victim > -NONE) evict((victim and INDEX_MASK).toInt(), actions)
        residency.take(expert)
        state[expert] = ExpertState.LOADING
        loads.begin(expert, kind)
        val speculative = kind == LoadKind.LOOKAHEAD
        if (speculative) {
            ahead[expert] = true
            counters.lookaheadLoads++
            counters.lookaheadBytes += residency.cost[expert]
        } else {
            counters.demandBytes += residency.cost[expert]
        }
        actions.add(Action.Load(expert, speculative, slab(expert), offsetBytes(expert)))
        return true
    }

    /** Take the expert off the loads under way. */
    private fun endLoad(expert: Int): LoadKind {
        val kind = loads.end(expert)
        if (kind == LoadKind.LOOKAHEAD) speculativeBytes -= residency.cost[expert]
        return kind
    }

    // ---- lookahead

    /** Queue those predicted experts that are absent, likely, within the cap and worth more than their victim. */
    private fun admit(layer: Int, scores: IntArray): IntList {
        val first = first(layer)
        // The odds are those of experts that need a load: what is in memory is there because it is used often.
        val absent = lookahead.rank(layer, scores).filter {
            state[first + it] != ExpertState.RESIDENT || ahead[first + it]
        }
        val odds = lookahead.note(layer, absent)
        val admitted = IntList()
        var victim = NONE
        for (index in 0 until absent.size) {
            val expert = first + absent.experts[index]
            val likely = odds[absent.ranks[index]]
            if (likely < config.lookaheadOdds || state[expert] != ExpertState.ABSENT) continue
            if (speculativeBytes + residency.cost[expert] > lookaheadCap * lookahead.level / FULL) break
            if (admitted.size == 0) victim = residency.worst(expert)
            val value = residency.policy.predicted(likely, nextVisit(layer), clock)
            if (victim < value shl INDEX_BITS) {
                state[expert] = ExpertState.QUEUED
                residency.entry[expert] = (value shl INDEX_BITS) or expert.toLong()
                speculativeBytes += residency.cost[expert]
                admitted.add(expert)
            }
        }
        return admitted
    }

    /** Experts of the layer in the lookahead queue, in its order. */
    private fun queuedAhead(layer: Int): IntArray {
        val queued = IntList()
        for (index in 0 until wanted.size) if (residency.layerOf[wanted[index]] == layer) queued.add(wanted[index])
        return queued.toIntArray()
    }

    private fun unqueue(expert: Int) {
        wanted.remove(expert)
        state[expert] = ExpertState.ABSENT
        speculativeBytes -= residency.cost[expert]
    }

    /** The layer's router has spoken: promote or cancel what is queued, and judge what was loaded ahead. */
    private fun settleSpeculation(layer: Int, actions: MutableList<Action>) {
        for (expert in queuedAhead(layer)) {
            unqueue(expert)
            actions.add(if (required[expert]) Action.Promote(expert) else Action.Cancel(expert))
        }
        for (expert in first(layer) until first(layer) + layers[layer].numExperts) {
            if (ahead[expert]) {
                ahead[expert] = false
                judge(required[expert])
            }
        }
    }

    private fun judge(useful: Boolean) {
        lookahead.outcome(useful)
        if (useful) counters.lookaheadUsed++ else counters.lookaheadWasted++
    }

    private fun nextVisit(layer: Int): Int = lastVisit[layer] + layers.size

    // ---- what is in memory

    /** A resident expert is not required (any more): it may be evicted, at once where it is not to be kept. */
    private fun letGo(expert: Int, actions: MutableList<Action>) {
        if (config.retain && !residency.retired(expert)) residency.offer(expert) else drop(expert, actions)
    }

    private fun evict(expert: Int, actions: MutableList<Action>) {
        residency.withdraw(expert)
        drop(expert, actions)
    }

    private fun drop(expert: Int, actions: MutableList<Action>) {
        counters.evictions++
        free(expert)
        actions.add(Action.Evict(expert))
    }

    /** Give up the expert's slot; a load ahead that is given up before its layer came was wasted. */
    private fun free(expert: Int) {
        residency.release(expert)
        state[expert] = ExpertState.ABSENT
        if (ahead[expert]) {
            ahead[expert] = false
            judge(false)
        }
    }
}
