package dev.lesonnx

import ai.onnxruntime.OrtSession
import java.nio.ByteOrder

/**
 * The twins of one width of steps, open: a step's segment as twin, cache rows and selection.
 *
 * [twins] are sessions by part, [others] by path; it owns the former, [Twins] the latter, and both outlive what it binds. Not
 * thread-safe.
 */
internal class TwinWidth(
    private val manifest: BundleManifest,
    private val record: TwinsRecord,
    val rows: Int,
    private val twins: Map<String, OrtSession>,
    private val others: Map<String, OrtSession>,
    private val platform: Platform,
) : AutoCloseable {
    val capacityTokens: Int = record.capacityTokens

    val hasHead: Boolean = manifest.part(PartRole.HEAD).name in twins

    // Between a twin and its selection, or the caches: the same for every segment, by what it is.
    private val between = HashMap<List<Any>, TensorArena>()
    private val given: Map<String, Tensor> = record.positions.outputs.associate { value ->
        val shape = LongArray(value.shape.size) { (value.shape[it] as? Dimension.Fixed)?.size ?: rows.toLong() }
        value.name to tensor(value.name, value.dtype, shape)
    }

    private fun tensor(name: String, dtype: Dtype, shape: LongArray): Tensor =
        between.getOrPut(listOf(name, dtype, shape.asList())) {
            TensorArena(platform).apply { plan(dtype.onnx, *shape) }.allocate()
        }[0]

    private fun tensor(name: String, value: Value): Tensor =
        tensor(name, value.dtype, LongArray(value.shape.size) { (value.shape[it] as Dimension.Fixed).size })

    /** Computes what all twins of a step take: angles of the positions, and which slots of the caches are seen. */
    fun begin(positionIds: Tensor, totalSequenceLength: Tensor) {
        val known = mapOf("position_ids" to positionIds, "total_sequence_length" to totalSequenceLength)
        bind(others.getValue(record.positions.path), record.positions.inputs.associate { it.name to known.getValue(it.name) }, given).run()
    }

    /** A segment's twin between the tensors of a step; valid as long as these and the caches stay where they are. */
    fun bind(part: String, inputs: Map<String, Tensor>, outputs: Map<String, Tensor>, states: LayerStates): BoundTwin {
        val twin = twinOf(part)
        val caches = cachesOf(part)
        val ends = twin.outputs.withIndex().associate { (number, value) ->
            // Rows of a kind may be shared by segments, not by the caches of one.
            value.name to (outputs[value.name] ?: tensor(if (value.name in caches) "$number" else value.name, value))
        }
        val selection = record.selections.first { it.part == part }
        val select = bind(
            others.getValue(selection.path),
            selection.inputs.associate { it.name to ends.getValue(it.name) },
            selection.outputs.associate { it.name to outputs.getValue(it.name) },
        )
        return BoundTwin(bind(twin, inputs, ends), select, caches.map { (name, state) -> state to ends.getValue(name) }.toMap(), states)
    }

    /** The head's twin; the pieces of [logits] [1,V] lie side by side. */
    fun bindHead(inputs: Map<String, Tensor>, logits: Tensor, states: LayerStates): BoundTwin {
        val head = manifest.part(PartRole.HEAD).name
        val twin = twinOf(head)
        val caches = cachesOf(head)
        val pieces = ArrayList<Tensor>()
        var start = 0
        val ends = twin.outputs.withIndex().associate { (number, value) ->
            value.name to if (value.name.startsWith(LOGITS_PREFIX)) {
                val size = (value.shape.last() as Dimension.Fixed).size
                piece(logits, start, value).also(pieces::add).also { start += size.toInt() }
            } else {
                tensor(if (value.name in caches) "head $number" else value.name, value)
            }
        }
        return BoundTwin(bind(twin, inputs, ends), null, caches.map { (name, state) -> state to ends.getValue(name) }.toMap(), states, pieces)
    }

    private fun piece(logits: Tensor, start: Int, value: Value): Tensor {
        val shape = LongArray(value.shape.size) { (value.shape[it] as Dimension.Fixed).size }
        val end = start + shape.last().toInt()
        val bytes = logits.bytes.duplicate().limit(end * Float.SIZE_BYTES).position(start * Float.SIZE_BYTES).slice().order(ByteOrder.nativeOrder())
        return Tensor(logits.type, shape, bytes)
    }

    /** The names of states by what the part's twin calls their rows. */
    private fun cachesOf(part: String): Map<String, String> =
        manifest.states.filter { it.part == part }.associate { rowsName(it.output) to it.name }

    private fun twinOf(part: String): Twin = checkNotNull(record.of(part, rows)) { "$part has no twin of $rows rows" }

    private fun bind(twin: Twin, inputs: Map<String, Tensor>, outputs: Map<String, Tensor>): Binding {
        val known = inputs + given
        return bind(twins.getValue(twin.part), twin.inputs.associate { it.name to known.getValue(it.name) }, outputs)
    }

    private fun bind(session: OrtSession, inputs: Map<String, Tensor>, outputs: Map<String, Tensor>): Binding =
        Binding(session, inputs.mapValues { it.value.onnx }, outputs.mapValues { it.value.onnx })

    override fun close() {
        twins.values.forEach(OrtSession::close)
        between.values.forEach(TensorArena::close)
        between.clear()
    }
}

/**
 * A twin between the tensors of a step: runs it, puts its rows into the caches, and selects experts. Owns [pieces]; closed by the step
 * that it was bound for. Not thread-safe.
 */
internal class BoundTwin(
    private val twin: Binding,
    private val selection: Binding?,
    private val rows: Map<String, Tensor>,
    private val states: LayerStates,
    private val pieces: List<Tensor> = emptyList(),
) : AutoCloseable {
    fun run() {
        twin.run()
        states.writeRows(rows)
        selection?.run()
    }

    override fun close() = pieces.forEach(Tensor::close)
}
