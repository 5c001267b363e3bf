package dev.lesonnx

/** Loads, computes and evicts experts. [load] may run on several threads at once, [evict] under the scheduler's lock, the rest on the computing thread. */
internal interface ExpertEngine : AutoCloseable {
    val name: String

    /** Why this engine was taken, where that is worth a line to the user. */
    val notes: List<String>

    /** Memory that a byte of experts takes, for a budget of the whole process. */
    val memoryPerByte: Double

    /** The cache's slabs by number; the first call says how many and how long they can be. [LoadError] where experts cannot be moved. */
    fun resize(slabBytes: LongArray)

    /** Brings an expert to its place in the cache; gives the bytes read. IOException or [LesonnxError] where that fails. */
    fun load(expert: Expert, slab: Int, offsetBytes: Long): Long

    /** Computes loaded experts of one layer. */
    fun compute(experts: IntArray, work: LayerWork)

    /** Forgets a loaded expert: its place may be taken. */
    fun evict(expert: Expert)

    /** Whether the caller may give up the tensors of [work]: nothing of them is used after this. */
    fun forget(work: LayerWork)
}

/** The names that [LoadOptions.engine] takes. */
val ENGINES: List<String> = listOf("auto", "kernel", "session")

/**
 * The engine of that name: `kernel`, `session` (plain ONNX Runtime), or `auto`, the fastest that works here.
 *
 * [InputError] for another name, or for `kernel` where its library is not there.
 */
internal fun makeEngine(name: String, bundle: Bundle, platform: Platform, numThreads: Int): ExpertEngine {
    if (name !in ENGINES) throw InputError("engine '$name' is not one of ${ENGINES.joinToString()}")
    if (name == "session") return SessionEngine(bundle, platform, emptyList())
    val reason = KernelEngine.whyNot(bundle, platform) ?: return KernelEngine(bundle, platform, numThreads)
    if (name == "kernel") throw InputError("engine kernel cannot be used: $reason")
    return SessionEngine(bundle, platform, listOf("engine session is used, since the faster kernel cannot be: $reason"))
}

/**
 * What a layer's router asked for in one step of T rows, and the tensors that experts read and write.
 *
 * Made once a width and filled anew for every layer: [route] groups the flat places `t * k + slot` by expert. Owned by the
 * step's buffers; not thread-safe.
 */
internal class LayerWork(memory: StepMemory, val numRows: Int) : AutoCloseable {
    private val numExperts = memory.manifest.model.numExperts

    /** Experts of a row. */
    val slots: Int = memory.manifest.model.numExpertsPerTok

    /** [T,H]: what experts read. */
    val hidden: Tensor = memory.beginning("moe_input", numRows)

    /** [T,k,H]: routed experts write their rows there. */
    val expertOut: Tensor = memory.beginning("expert_out", numRows)

    /** [T,H]: the shared expert writes there. */
    val sharedOut: Tensor = memory.beginning("shared_out", numRows)

    /** The same, as an output of one slot: [T,1,H]. */
    val sharedOutSlots: Tensor = sharedOut.withShape(numRows.toLong(), 1, sharedOut.shape[1])

    /** Room for what the kernel's operator is told: as many experts, starts and rows as there can be. */
    val offsets: Tensor = memory.beginning("offsets", numRows)
    val rowStarts: Tensor = memory.beginning("row_starts", numRows)
    val rows: Tensor = memory.beginning("rows", numRows)

    /** The router's choice: k experts a row, strongest first. */
    val topkIds: Array<IntArray> = Array(numRows) { IntArray(slots) }

    /** The number of the layer's first expert. */
    var first: Int = 0
        private set

    /** Routed experts of this layer with at least one row. */
    var numUsed: Int = 0
        private set

    private val starts = IntArray(numExperts + 1)
    private val places = IntArray(numRows * slots)
    private val next = IntArray(numExperts)

    /** Takes the router's choice over from [topk] int64 [T,k] and groups it. [LesonnxError] for an expert that is not there. */
    fun route(first: Int, topk: Tensor) {
        this.first = first
        starts.fill(0)
        for (place in places.indices) {
            val expert = topk.longs.get(place).toInt()
            if (expert !in next.indices) throw LesonnxError("the router names expert $expert of ${next.size}")
            topkIds[place / slots][place % slots] = expert
            starts[expert + 1]++
        }
        numUsed = 0
        for (expert in next.indices) {
            if (starts[expert + 1] > 0) numUsed++
            next[expert] = starts[expert]
            starts[expert + 1] += starts[expert]
        }
        for (place in places.indices) places[next[topkIds[place / slots][place % slots]]++] = place
    }

    /** How many rows the routed expert of that number computes. */
    fun numRowsOf(expert: Int): Int = starts[expert - first + 1] - starts[expert - first]

    /** Its flat place number [index], ascending. */
    fun place(expert: Int, index: Int): Int = places[starts[expert - first] + index]

    override fun close() = listOf(hidden, expertOut, sharedOut, sharedOutSlots, offsets, rowStarts, rows).forEach(Tensor::close)
}
