package dev.lesonnx

/**
 * What a manifest must say of its drafter, by itself and beside the model: its parts, what they take and give, and the layers that
 * it reads. Part of [ManifestCheck]; the checks of `lesonnx/drafter_wiring.py`, in its words.
 */
internal class DrafterCheck(private val manifest: BundleManifest, private val drafter: DrafterRecord) {
    /** What is wrong with the record alone. */
    fun ownProblems(): Sequence<String> = sequence {
        if (drafter.blockSize !in 1..MOST_SLOTS) yield("block_size: ${drafter.blockSize}, expected 1 to $MOST_SLOTS")
        if (drafter.maskTokenId < 0) yield("mask_token_id: ${drafter.maskTokenId}, expected at least 0")
        if (drafter.targetLayerIds.isEmpty()) yield("target_layer_ids: empty, expected at least one layer")
        for (idx in drafter.targetLayerIds) if (idx !in EMBEDDING_IDX..MOST_LAYER) yield("target_layer_ids: $idx, expected -1 to $MOST_LAYER")
        if (drafter.markovRank < 1) yield("markov_rank: ${drafter.markovRank}, expected at least 1")
        if (drafter.numParameters < 1) yield("num_parameters: ${drafter.numParameters}, expected at least 1")
        for ((place, part) in drafter.parts.withIndex()) {
            if (!staysInside(part.path)) yield("parts.$place.path: path '${part.path}' must be relative and stay inside the bundle")
        }
    }

    /** Whether it fits the model. */
    fun fitProblems(): Sequence<String> = sequence {
        if (drafter.parts.map { it.role }.sorted() != ROLES) {
            yield("the drafter has exactly one part of each role: ${ROLES.joinToString { it.name.lowercase() }}")
            return@sequence
        }
        if (manifest.parts.any { it.role in ROLES }) yield("the drafter's parts belong into drafter.parts")
        val vocabSize = manifest.model.vocabSize
        if (drafter.maskTokenId >= vocabSize) yield("drafter: mask_token_id is ${drafter.maskTokenId}, expected less than $vocabSize")
        val given = manifest.parts.flatMap { it.outputs }.map { it.name }.toSet()
        for (idx in drafter.targetLayerIds) {
            if (layerOutputName(idx) !in given) yield("drafter: target_layer_ids names layer $idx, whose output no part gives")
        }
        if (drafter.targetLayerIds.toSet().size != drafter.targetLayerIds.size) yield("drafter: target_layer_ids names a layer twice")
        val caches = drafter.part(PartRole.DRAFTER_CONTEXT).outputs
        for (cache in caches) {
            if ((cache.shape.lastOrNull() as? Dimension.Fixed)?.size in CACHE_SIZES) continue
            yield("drafter: shape ${cache.shape} of cache '${cache.name}' is not [1, 'T', size]")
            return@sequence
        }
        for (part in drafter.parts) yieldAll(wiringProblems(part))
    }

    /** What a part takes and gives. The caches are what the context part says they are. */
    private fun wiringProblems(part: Part): Sequence<String> {
        val size = manifest.model.hiddenSize.toLong()
        val vocab = manifest.model.vocabSize.toLong()
        val block = drafter.blockSize.toLong()
        return when (part.role) {
            PartRole.DRAFTER_CONTEXT -> {
                val width = size * drafter.targetLayerIds.size
                val takes = listOf(value("layer_outputs", Dtype.FLOAT32, 1, "T", width), value("position_ids", Dtype.INT64, 1, "T"))
                check(part, "takes", part.inputs, takes) + check(part, "gives", part.outputs, caches("T"))
            }
            PartRole.DRAFTER_BLOCK -> {
                val takes = caches("P") + value("input_ids", Dtype.INT64, 1, block) + value("position_ids", Dtype.INT64, 1, block) +
                    value("logit_rows", Dtype.INT64, "R")
                val gives = listOf(value("base_logits", Dtype.FLOAT32, "R", vocab), value("slot_hidden", Dtype.FLOAT32, "R", size))
                check(part, "takes", part.inputs, takes) + check(part, "gives", part.outputs, gives)
            }
            else -> {
                val takes = listOf(
                    value("base_logits", Dtype.FLOAT32, 1, vocab),
                    value("slot_hidden", Dtype.FLOAT32, 1, size),
                    value("token_id", Dtype.INT64, 1),
                )
                val confidence = if (drafter.hasConfidence) listOf(value("confidence", Dtype.FLOAT32, 1)) else emptyList()
                check(part, "takes", part.inputs, takes) +
                    check(part, "gives", part.outputs, listOf(value("logits", Dtype.FLOAT32, 1, vocab)) + confidence)
            }
        }
    }

    private fun caches(tokens: String): List<Value> = drafter.cacheSizes.map { (name, size) -> value(name, Dtype.FLOAT32, 1, tokens, size) }

    /** A dimension is a number or a letter. */
    private fun value(name: String, dtype: Dtype, vararg shape: Any): Value =
        Value(name, dtype, shape.map { if (it is String) Dimension.Symbol(it) else Dimension.Fixed((it as Number).toLong()) })

    private fun check(part: Part, verb: String, found: List<Value>, expected: List<Value>): Sequence<String> = sequence {
        val byName = found.associateBy { it.name }
        for (value in expected) {
            val other = byName[value.name]
            if (other == null) {
                yield("drafter: part '${part.name}' $verb no '${value.name}'")
            } else if (other != value) {
                yield("drafter: '${value.name}' of part '${part.name}' is ${typeAndShape(other)}, expected ${typeAndShape(value)}")
            }
        }
        val surplus = (byName.keys - expected.map { it.name }.toSet()).minOrNull()
        if (surplus != null) yield("drafter: part '${part.name}' $verb '$surplus', which no host knows")
    }

    private fun typeAndShape(value: Value) = "${value.dtype.name.lowercase()} ${value.shape}"

    private companion object {
        const val MOST_SLOTS = 1 shl 8
        const val MOST_LAYER = 1 shl 16
        val CACHE_SIZES = 1L until (1L shl 20)
        val ROLES = listOf(PartRole.DRAFTER_CONTEXT, PartRole.DRAFTER_BLOCK, PartRole.DRAFTER_MARKOV)
    }
}
