package dev.lesonnx

/**
 * The tensors of a step of [numRows] rows, over a [StepMemory]. Made once a width, so that a step only writes into them. Owned by a
 * runner, which closes them before the memory; not thread-safe.
 */
internal class StepBuffers(private val memory: StepMemory, val numRows: Int) : AutoCloseable {
    private val tensors = ArrayList<Tensor>()

    val inputIds: Tensor = tensor("input_ids")
    val positionIds: Tensor = tensor("position_ids")
    val hidden: Tensor = tensor("hidden")
    val topkIds: Tensor = tensor("topk_ids")
    val routerScores: Tensor = tensor("router_scores")
    val ready: Tensor = tensor("ready")
    val lookaheadScores: Tensor = tensor("lookahead_scores")

    /** What flows from one part to the next; two of them, since a part may not write what it reads. */
    class Stream(val residual: Tensor, val topkWeights: Tensor, val sharedWeights: Tensor)

    private val streams = List(2) { Stream(tensor("residual $it"), tensor("topk_weights $it"), tensor("shared_weights $it")) }

    /** What a mixer makes of its segment's residual; null where the bundle has no mixers. */
    val mixedResidual: Tensor? = if (memory.hasMixers) tensor("mixed_residual") else null

    /** What layers give that are read, by the names of the parts' outputs; the embedding's is [hidden]. */
    val layerOutputs: Map<String, Tensor> =
        memory.layerIdxs.filter { it != EMBEDDING_IDX }.map(::layerOutputName).associateWith(::tensor)
    private val layerRows: Tensor? = if (memory.layerIdxs.isEmpty()) null else tensor("layer_rows")

    /** What segment number [place] leaves. */
    fun streamAfter(place: Int): Stream = streams[place and 1]

    /** What experts read and write. */
    val work: LayerWork = LayerWork(memory, numRows)

    private fun tensor(name: String): Tensor = memory.beginning(name, numRows).also(tensors::add)

    /** The step's layer outputs side by side: float32 [T, n*H]. There must be such layers. */
    fun gatherLayers(): Tensor {
        val all = checkNotNull(layerRows) { "no layer is read" }
        val size = memory.manifest.model.hiddenSize
        val target = all.floats.duplicate()
        val sources = memory.layerIdxs.map { if (it == EMBEDDING_IDX) hidden else layerOutputs.getValue(layerOutputName(it)) }.map { it.floats.duplicate() }
        target.position(0)
        for (row in 0 until numRows) {
            for (source in sources) target.put(source.limit((row + 1) * size).position(row * size))
        }
        return all
    }

    override fun close() {
        work.close()
        tensors.forEach(Tensor::close)
    }
}
