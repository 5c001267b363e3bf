package dev.lesonnx

/** What a manifest must say of one state, by itself and beside the parts it names. Part of [ManifestCheck], in the same words. */
internal class StateCheck(private val manifest: BundleManifest, private val state: State) {
    private val name = "state '${state.name}'"

    /** What is wrong with the state alone. */
    fun ownProblems(): Sequence<String> = sequence {
        val sizes = state.shape.filterIsInstance<Dimension.Fixed>().map { it.size }
        val areBounded = sizes.all { it in SIZES }
        if (state.isAttention) {
            val fits = state.shape.size == 4 && state.shape[2] == Dimension.Symbol("S") && sizes.size == 3
            if (!fits || !areBounded) yield("shape ${state.shape} of $name is not [1, heads, 'S', size]")
        } else if (sizes.isEmpty() || sizes.size != state.shape.size || !areBounded) {
            yield("shape ${state.shape} of $name is not fixed")
        }
        if (state.isAttention != (state.replay == null)) {
            yield("$name of kind ${state.kind.name.lowercase()}: replay belongs to states of fixed shape")
        }
        if (state.replay?.rows?.isEmpty() == true) yield("replay.rows: empty, expected at least one")
    }

    /** Whether the state's rows are what its replay part takes; its own part must be there. */
    fun replayProblems(): Sequence<String> = sequence {
        val replay = state.replay ?: return@sequence
        val part = manifest.parts.find { it.name == replay.part && it.role == PartRole.REPLAY }
        if (part == null) {
            yield("$name names '${replay.part}', which is no part of role replay")
            return@sequence
        }
        val past = part.inputs.find { it.name == "past" }
        val present = part.outputs.find { it.name == "present" }
        if (past == null || present == null || past.shape != state.shape || present.shape != state.shape) {
            yield("part '${part.name}' does not take past and give present ${state.shape}")
        }
        val taken = part.inputs.filter { it.name != "past" }
        if (taken.map { it.name }.toSet() != replay.rows.keys) {
            yield("$name: part '${part.name}' takes the rows ${taken.map { it.name }.sorted().joinToString()}")
            return@sequence
        }
        val given = manifest.parts.find { it.name == state.part }?.outputs.orEmpty()
        for (value in taken) {
            val rowName = replay.rows.getValue(value.name)
            val row = given.find { it.name == rowName }
            if (row == null || row.shape != value.shape || row.dtype != value.dtype) {
                yield("$name: rows '$rowName' are not what '${part.name}' takes")
            } else if (!isRow(row.shape)) {
                yield("shape ${row.shape} of the rows '$rowName' is not [1, 'T', size]")
            }
        }
    }

    private fun isRow(shape: List<Dimension>): Boolean =
        shape.size == 3 && shape.take(2) == ROW_BEGINS && (shape[2] as? Dimension.Fixed)?.size in SIZES

    private companion object {
        val SIZES = 1L until (1L shl 20)
        val ROW_BEGINS = listOf(Dimension.Fixed(1), Dimension.Symbol("T"))
    }
}
