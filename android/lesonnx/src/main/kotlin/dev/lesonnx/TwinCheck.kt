package dev.lesonnx

/**
 * What a manifest must say of its twins: whether they fit the parts that they stand for, what they take and give, and the caches they
 * read. Part of [ManifestCheck]; the checks of `lesonnx/twin_wiring.py`, in its words.
 */
internal class TwinCheck(private val manifest: BundleManifest, private val twins: TwinsRecord) {
    private val parts = manifest.parts.associateBy { it.name }

    /** What is wrong with the record alone. */
    fun ownProblems(): Sequence<String> = sequence {
        if (twins.capacityTokens < 1) yield("capacity_tokens: ${twins.capacityTokens}, expected at least 1")
        if (twins.floatBits != 16 && twins.floatBits != 32) yield("float_bits: ${twins.floatBits}, expected one of 16, 32")
        if (twins.exactOverWidths) yield("exact_over_widths: true, expected false")
        if (twins.parts.isEmpty()) yield("parts: empty, expected at least one")
        for ((place, twin) in twins.parts.withIndex()) if (twin.rows < 1) yield("parts.$place.rows: ${twin.rows}, expected at least 1")
        for (path in twins.paths) if (!staysInside(path)) yield("path '$path' must be relative and stay inside the bundle")
    }

    /** Whether they fit the model. */
    fun fitProblems(): Sequence<String> = sequence {
        val segments = manifest.parts.filter { it.role == PartRole.SEGMENT }.map { it.name }
        if (twins.selections.map { it.part } != segments) yield("every segment needs its selection, in the order of the segments")
        for (value in twins.positions.inputs) {
            if (value.name !in POSITION_INPUTS) yield("positions takes '${value.name}', which no host has for it")
        }
        for (twin in twins.parts) {
            val part = parts[twin.part]
            if (part == null || !(part.role == PartRole.SEGMENT || (part.role == PartRole.HEAD && twin.rows == 1))) {
                yield("'${twin.part}' with ${twin.rows} rows is no twin of a segment or of the head")
                return@sequence
            }
            yieldAll(twinProblems(twin, part))
        }
        for (rows in twins.parts.map { it.rows }.distinct()) {
            val missing = segments.firstOrNull { twins.of(it, rows) == null }
            if (missing != null) yield("'$missing' has none of $rows rows")
        }
        for ((name, same) in twins.parts.groupBy { it.part to it.rows }) {
            if (same.size > 1) yield("'${name.first}' has two of ${name.second} rows")
        }
        for (selection in twins.selections) yieldAll(selectionProblems(selection))
    }

    private fun fixed(value: Value, rows: Int): Value {
        val known = mapOf("T" to rows, "S" to twins.capacityTokens, "R" to 1)
        return value.copy(
            shape = value.shape.map { size -> (size as? Dimension.Symbol)?.let { known[it.letter] }?.let { Dimension.Fixed(it.toLong()) } ?: size },
        )
    }

    /** A twin takes what its part or positions has for it; and gives what its part gives, or what a host knows. */
    private fun twinProblems(twin: Twin, part: Part): Sequence<String> = sequence {
        val states = manifest.states.filter { it.part == part.name }
        states.find { !it.isAttention }?.let { yield("state '${it.name}' of part '${part.name}' is no attention cache") }
        val takes = (part.inputs + twins.positions.outputs).map { fixed(it, twin.rows) }.associateBy { it.name }
        val rows = states.map { state ->
            Value(rowsName(state.output), state.dtype, state.shape.map { if (it == Dimension.Symbol("S")) Dimension.Fixed(twin.rows.toLong()) else it })
        }
        val gives = (part.outputs.map { fixed(it, twin.rows) } + rows).associateBy { it.name }
        for ((values, known) in listOf(twin.inputs to takes, twin.outputs to gives)) {
            for (value in values) {
                if (!value.shape.all { it is Dimension.Fixed && it.size > 0 }) {
                    yield("shape ${value.shape} of '${value.name}' of '${twin.path}' is not fixed")
                }
                val other = known[value.name]
                if (other != null && other != value) {
                    yield("'${value.name}' of '${twin.path}' is ${typeAndShape(value)}, expected ${typeAndShape(other)}")
                }
            }
        }
        for (value in twin.inputs) {
            if (value.name !in takes) yield("'${twin.path}' takes '${value.name}', which neither its part nor positions has")
        }
        val names = twin.outputs.map { it.name }
        val needed = rows.map { it.name } + if (part.role == PartRole.SEGMENT) listOf("residual_out", "moe_input") else emptyList()
        needed.firstOrNull { it !in names }?.let { yield("'${twin.path}' does not give '$it'") }
        if (part.role == PartRole.HEAD) {
            val pieces = twin.outputs.filter { it.name.startsWith(LOGITS_PREFIX) }.sumOf { (it.shape.last() as? Dimension.Fixed)?.size ?: 0L }
            val vocabSize = manifest.model.vocabSize
            if (pieces != vocabSize.toLong()) yield("the pieces of logits of '${twin.path}' are not $vocabSize in all")
        }
    }

    /** A selection takes what every twin of its segment ends at, and gives what the segment gives of its router. */
    private fun selectionProblems(selection: Selection): Sequence<String> = sequence {
        for (twin in twins.parts.filter { it.part == selection.part }) {
            val given = twin.outputs.associateBy { it.name }
            val other = selection.inputs.firstOrNull { given[it.name] != fixed(it, twin.rows) }
            if (other != null) yield("the selection of '${selection.part}' takes '${other.name}', unlike what '${twin.path}' gives")
        }
        val expected = parts[selection.part]?.outputs.orEmpty().associateBy { it.name }
        for (value in selection.outputs) {
            if (expected[value.name]?.shape != value.shape) {
                yield("the selection of '${selection.part}' gives '${value.name}', which its segment does not")
            }
        }
        val missing = (ROUTER_OUTPUTS.filter { it in expected } - selection.outputs.map { it.name }.toSet()).minOrNull()
        if (missing != null) yield("the selection of '${selection.part}' does not give '$missing'")
    }

    private fun typeAndShape(value: Value) = "${value.dtype.name.lowercase()} ${value.shape}"

    private companion object {
        val POSITION_INPUTS = setOf("position_ids", "total_sequence_length")
        val ROUTER_OUTPUTS = listOf("topk_ids", "topk_weights_out", "shared_weights_out", "router_scores")
    }
}
