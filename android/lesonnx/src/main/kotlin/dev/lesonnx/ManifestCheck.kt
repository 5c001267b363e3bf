package dev.lesonnx

/** What a manifest must say beyond its types; the checks of `lesonnx/manifest.py`, in its words. */
internal class ManifestCheck(private val manifest: BundleManifest) {
    /** The first thing that is wrong, as `field: what`; null where nothing is. */
    fun firstProblem(): String? = (facts() + parts() + states() + kinds() + layers() + tokenizer() + drafter() + twins() + vision() + references()).firstOrNull()

    private fun facts(): Sequence<String> = sequence {
        if (!VERSION.matches(manifest.onnxruntimeAtLeast)) {
            yield("onnxruntime_at_least: '${manifest.onnxruntimeAtLeast}' is not a version, such as 1.24")
        }
        count("prefill_chunk_tokens", manifest.prefillChunkTokens)
        val model = manifest.model
        for ((key, size) in mapOf(
            "hidden_size" to model.hiddenSize,
            "num_hidden_layers" to model.numHiddenLayers,
            "vocab_size" to model.vocabSize,
            "num_experts" to model.numExperts,
            "num_experts_per_tok" to model.numExpertsPerTok,
            "moe_intermediate_size" to model.moeIntermediateSize,
            "max_position_embeddings" to model.maxPositionEmbeddings,
        )) count("model.$key", size.toLong())
        count("model.num_parameters", model.numParameters)
        count("model.num_active_parameters", model.numActiveParameters)
        for (token in model.eosTokenIds) offset("model.eos_token_ids", token.toLong())
        offset("model.bos_token_id", model.bosTokenId?.toLong())
        offset("model.pad_token_id", model.padTokenId?.toLong())
        val quantization = manifest.quantization
        oneOf("quantization.expert_bits", quantization.expertBits, BITS)
        oneOf("quantization.dense_bits", quantization.denseBits, setOf(4, 8, 32))
        oneOf("quantization.kv_bits", quantization.kvBits, setOf(8, 16, 32))
        oneOf("quantization.block_size", quantization.blockSize, BLOCK_SIZES)
        quantization.calibration?.let { yieldAll(calibration("quantization.calibration", it)) }
    }

    private fun calibration(field: String, calibration: Calibration): Sequence<String> = sequence {
        val digest = calibration.textSha256
        if (digest != null && !DIGEST.matches(digest)) yield("$field.text_sha256: '$digest' is not a SHA-256 in lower case")
        count("$field.num_tokens", calibration.numTokens)
        count("$field.baseline_bytes", calibration.baselineBytes)
        val share = calibration.targetSize
        if (share != null && share <= 0) yield("$field.target_size: $share, expected more than 0")
        calibration.layers.find { it.expectedLoss < 0 }?.let {
            yield("$field.layers: layer ${it.layerIdx} is expected to lose ${it.expectedLoss}, expected 0 or more")
        }
        if (calibration.layers.map { it.layerIdx } != manifest.expertLayers.map { it.layerIdx }) {
            yield("$field.layers: not the layers of expert_layers")
        }
    }

    private fun parts(): Sequence<String> = sequence {
        for ((place, part) in manifest.parts.withIndex()) {
            path("parts.$place.path", part.path)
            offset("parts.$place.layer_idx", part.layerIdx?.toLong())
        }
    }

    private fun states(): Sequence<String> = sequence {
        for ((place, state) in manifest.states.withIndex()) {
            offset("states.$place.layer_idx", state.layerIdx.toLong())
            yieldAll(StateCheck(manifest, state).ownProblems().map { "states.$place: $it" })
        }
    }

    private fun kinds(): Sequence<String> = sequence {
        for ((place, kind) in manifest.expertKinds.withIndex()) {
            val field = "expert_kinds.$place"
            count("$field.hidden_size", kind.hiddenSize)
            count("$field.intermediate_size", kind.intermediateSize)
            count("$field.length_bytes", kind.lengthBytes)
            if (kind.stage != null) path("$field.stage", kind.stage)
            for ((name, matrix) in kind.matrices) {
                matrix("$field.$name", matrix)
                yieldAll(fit(field, name, matrix, kind))
            }
        }
    }

    private suspend fun SequenceScope<String>.matrix(field: String, matrix: ExpertMatrix) {
        count("$field.rows", matrix.rows)
        count("$field.columns", matrix.columns)
        oneOf("$field.bits", matrix.bits, BITS)
        oneOf("$field.block_size", matrix.blockSize, BLOCK_SIZES)
        offset("$field.weight_offset_bytes", matrix.weightOffsetBytes)
        offset("$field.scales_offset_bytes", matrix.scalesOffsetBytes)
        offset("$field.bias_offset_bytes", matrix.biasOffsetBytes)
        val isFloat = matrix.bits == 32
        if (isFloat != (matrix.blockSize == 0) || isFloat != (matrix.scalesOffsetBytes == null)) {
            yield("$field: block_size and scales belong to quantized matrices, and to every one of them")
        }
    }

    /** Whether a matrix has the kind's shape and lies within the expert. */
    private fun fit(field: String, name: String, matrix: ExpertMatrix, kind: ExpertKind): Sequence<String> = sequence {
        val hiddenFirst = name == "down_proj"
        val rows = if (hiddenFirst) kind.hiddenSize else kind.intermediateSize
        val columns = if (hiddenFirst) kind.intermediateSize else kind.hiddenSize
        if (matrix.rows != rows || matrix.columns != columns) {
            yield("$field: $name is [${matrix.rows},${matrix.columns}], expected [$rows,$columns]")
        }
        // What is longer than any expert could overflow when multiplied; it is beyond in any case.
        val isVast = matrix.rows.toDouble() * matrix.columns * 4 > MOST_COUNT
        val end = if (isVast) {
            MOST_COUNT
        } else {
            maxOf(
                matrix.weightOffsetBytes + matrix.weightBytes,
                matrix.scalesOffsetBytes?.let { it + matrix.scalesBytes } ?: 0,
                matrix.biasOffsetBytes?.let { it + matrix.rows * 4 } ?: 0,
            )
        }
        if (end > kind.lengthBytes) yield("$field: $name ends at byte $end, beyond the expert's ${kind.lengthBytes}")
    }

    private fun layers(): Sequence<String> = sequence {
        if (manifest.expertLayers.isEmpty()) yield("expert_layers: empty, expected at least one layer")
        for ((place, layer) in manifest.expertLayers.withIndex()) {
            offset("expert_layers.$place.layer_idx", layer.layerIdx.toLong())
            path("expert_layers.$place.pack", layer.pack)
            count("expert_layers.$place.num_experts", layer.numExperts.toLong())
            count("expert_layers.$place.num_experts_per_tok", layer.numExpertsPerTok.toLong())
            offset("expert_layers.$place.kind", layer.kind.toLong())
            offset("expert_layers.$place.shared_kind", layer.sharedKind?.toLong())
        }
    }

    private fun tokenizer(): Sequence<String> = sequence {
        val files = manifest.tokenizer ?: return@sequence
        for ((key, path) in mapOf(
            "json_path" to files.jsonPath,
            "onnx" to files.onnx,
            "config" to files.config,
            "chat_template" to files.chatTemplate,
        )) if (path != null) path("tokenizer.$key", path)
    }

    private fun drafter(): Sequence<String> = sequence {
        val drafter = manifest.drafter ?: return@sequence
        yieldAll(DrafterCheck(manifest, drafter).ownProblems().map { "drafter.$it" })
    }

    private fun twins(): Sequence<String> = sequence {
        val twins = manifest.twins ?: return@sequence
        yieldAll(TwinCheck(manifest, twins).ownProblems().map { "twins.$it" })
    }

    private fun vision(): Sequence<String> = sequence {
        val vision = manifest.vision ?: return@sequence
        yieldAll(VisionCheck(manifest, vision).ownProblems().map { "vision.$it" })
    }

    /** What one record says of another. */
    private fun references(): Sequence<String> = sequence {
        val parts = manifest.parts
        val names = parts.map { it.name }
        if (names.toSet().size != names.size) yield("parts: two parts have one name")
        for (role in listOf(PartRole.EMBED, PartRole.HEAD)) {
            val name = role.name.lowercase()
            if (parts.filter { it.role == role }.map { it.name } != listOf(name)) {
                yield("parts: a bundle has exactly one $name part, of that name")
            }
        }
        for (state in manifest.states) {
            if (state.part !in names) yield("states: state '${state.name}' names part '${state.part}', which is not there")
            yieldAll(StateCheck(manifest, state).replayProblems().map { "states: $it" })
        }
        if (parts.filter { it.role == PartRole.MIXER }.any { mixer -> manifest.expertLayers.none { it.layerIdx == mixer.layerIdx } }) {
            yield("parts: a mixer part belongs to no MoE layer")
        }
        val ahead = parts.filter { it.role == PartRole.LOOKAHEAD }.map { it.layerIdx }
        for (layer in manifest.expertLayers.drop(1)) {
            if (layer.layerIdx !in ahead) yield("parts: layer ${layer.layerIdx} has no lookahead part")
        }
        val segments = parts.filter { it.role == PartRole.SEGMENT }.map { it.layerIdx }
        if (segments != manifest.expertLayers.map { it.layerIdx }) {
            yield("parts: every MoE layer needs its segment, in the order of the layers")
        }
        val positions = parts.flatMap { part -> part.inputs.filter { it.name == "position_ids" } }.map { it.shape }.distinct()
        if (positions.size > 1) yield("parts: position_ids are ${positions.joinToString(" and ")}, expected one shape in all parts")
        val model = manifest.model
        if (model.numExpertsPerTok > model.numExperts) {
            yield("model: ${model.numExpertsPerTok} experts a token of ${model.numExperts}")
        }
        for ((place, layer) in manifest.expertLayers.withIndex()) {
            same("expert_layers.$place: num_experts", layer.numExperts, model.numExperts)
            same("expert_layers.$place: num_experts_per_tok", layer.numExpertsPerTok, model.numExpertsPerTok)
            for (kind in listOfNotNull(layer.kind, layer.sharedKind)) {
                if (kind >= manifest.expertKinds.size) {
                    yield("expert_layers.$place: layer ${layer.layerIdx} names expert kind $kind of ${manifest.expertKinds.size}")
                }
            }
        }
        manifest.drafter?.let { yieldAll(DrafterCheck(manifest, it).fitProblems()) }
        manifest.twins?.let { twins -> yieldAll(TwinCheck(manifest, twins).fitProblems().map { "twins: $it" }) }
        manifest.vision?.let { yieldAll(VisionCheck(manifest, it).fitProblems()) }
    }

    private suspend fun SequenceScope<String>.same(field: String, found: Int, expected: Int) {
        if (found != expected) yield("$field is $found, the model's is $expected")
    }

    private suspend fun SequenceScope<String>.count(field: String, value: Long) {
        if (value !in 1..MOST_COUNT) yield("$field: $value, expected 1 to $MOST_COUNT")
    }

    private suspend fun SequenceScope<String>.offset(field: String, value: Long?) {
        if (value != null && value !in 0..MOST_COUNT) yield("$field: $value, expected 0 to $MOST_COUNT")
    }

    private suspend fun SequenceScope<String>.oneOf(field: String, value: Int, allowed: Set<Int>) {
        if (value !in allowed) yield("$field: $value, expected one of ${allowed.joinToString()}")
    }

    private suspend fun SequenceScope<String>.path(field: String, path: String) {
        if (!staysInside(path)) yield("$field: path '$path' must be relative and stay inside the bundle")
    }

    private companion object {
        // No count of a model or a file is larger; what is, would only exhaust the memory of whoever believes it.
        const val MOST_COUNT = 1L shl 48
        val BITS = setOf(2, 4, 8, 32)
        val DIGEST = Regex("[0-9a-f]{64}")
        val BLOCK_SIZES = setOf(0, 16, 32, 64, 128)
        val VERSION = Regex("[0-9]{1,4}(\\.[0-9]{1,4}){0,2}")
    }
}

/** Whether a path is relative and cannot leave the bundle, whatever system reads it. */
internal fun staysInside(path: String): Boolean =
    path.isNotEmpty() && !path.startsWith("/") && path.none { it == '\\' || it == ':' || it == '\u0000' } &&
        ".." !in path.split("/")
