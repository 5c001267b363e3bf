package dev.lesonnx

/**
 * What a manifest must say of how pictures come in, by itself and beside the model: the parts, what they take and give, and the marks'
 * token ids. Part of [ManifestCheck]; the checks of `lesonnx/vision_wiring.py`, in its words.
 */
internal class VisionCheck(private val manifest: BundleManifest, private val vision: VisionRecord) {
    private val tokens = vision.tokens.run {
        mapOf(
            "image" to image,
            "image_start" to imageStart,
            "image_end" to imageEnd,
            "slice_start" to sliceStart,
            "slice_end" to sliceEnd,
            "newline" to newline,
        )
    }

    /** What is wrong with the record alone. */
    fun ownProblems(): Sequence<String> = sequence {
        for ((place, part) in vision.parts.withIndex()) yieldAll(pathProblems("parts.$place.path", part.path))
        yieldAll(pathProblems("data", vision.data))
        for ((key, size, most) in listOf(
            Triple("patch_size", vision.patchSize, MOST_PATCH),
            Triple("scale_resolution", vision.scaleResolution, MOST_RESOLUTION),
            Triple("max_slice_nums", vision.maxSliceNums, MOST_SLICES),
        )) if (size !in 1..most) yield("$key: $size, expected 1 to $most")
        if (vision.tokenPatches !in TOKEN_PATCHES) yield("token_patches: ${vision.tokenPatches}, expected ${TOKEN_PATCHES.joinToString(" or ")}")
        for ((key, count) in mapOf("num_parameters" to vision.numParameters, "working_bytes" to vision.workingBytes)) {
            if (count !in 1..MOST_COUNT) yield("$key: $count, expected 1 to $MOST_COUNT")
        }
        for ((name, token) in tokens) if (token < 0) yield("tokens.$name: $token, expected at least 0")
        if (vision.texts.placeholder.isEmpty()) yield("texts.placeholder: empty, expected a text")
    }

    private fun pathProblems(field: String, path: String): Sequence<String> =
        if (staysInside(path)) emptySequence() else sequenceOf("$field: path '$path' must be relative and stay inside the bundle")

    /** Whether it fits the model. */
    fun fitProblems(): Sequence<String> = sequence {
        if (vision.parts.map { it.role }.sorted() != ROLES) {
            yield("vision has exactly one part of each role: ${ROLES.joinToString { it.name.lowercase() }}")
            return@sequence
        }
        if (manifest.parts.any { it.role in ROLES }) yield("vision's parts belong into vision.parts")
        if (manifest.positionRows != PICTURE_ROWS) yield("vision: the model's parts take position_ids [1, T], expected [3, 1, T]")
        val vocabSize = manifest.model.vocabSize
        for ((name, token) in tokens) if (token >= vocabSize) yield("vision: tokens.$name is $token, expected less than $vocabSize")
        if ((vision.texts.idStart == null) != (vision.texts.idEnd == null)) {
            yield("vision: texts has one of id_start and id_end, expected both or none")
        }
        val pixels = value("pixel_values", Dtype.FLOAT32, 1, CHANNELS, vision.patchSize, "W")
        val picture = listOf(value("image", Dtype.UINT8, "Y", "X", CHANNELS), value("size", Dtype.INT64, 2), value("grid", Dtype.INT64, 2))
        val prepare = vision.part(PartRole.VISION_PREPARE)
        yieldAll(problems(prepare, "takes", prepare.inputs, picture) + problems(prepare, "gives", prepare.outputs, listOf(pixels)))
        val tower = vision.part(PartRole.VISION_TOWER)
        val crops = listOf(pixels, value("target_size", Dtype.INT64, 2))
        val features = listOf(value("image_features", Dtype.FLOAT32, "I", manifest.model.hiddenSize))
        yieldAll(problems(tower, "takes", tower.inputs, crops) + problems(tower, "gives", tower.outputs, features))
    }

    /** A dimension is a number or a letter. */
    private fun value(name: String, dtype: Dtype, vararg shape: Any): Value =
        Value(name, dtype, shape.map { if (it is String) Dimension.Symbol(it) else Dimension.Fixed((it as Number).toLong()) })

    private fun problems(part: Part, verb: String, found: List<Value>, expected: List<Value>): Sequence<String> =
        if (found.size == expected.size && found.toSet() == expected.toSet()) emptySequence()
        else sequenceOf("vision: part '${part.name}' $verb ${shown(found)}, expected ${shown(expected)}")

    private fun shown(values: List<Value>) =
        values.sortedBy { it.name }.joinToString { "${it.name} ${it.dtype.name.lowercase()} ${it.shape}" }

    private companion object {
        const val CHANNELS = 3
        const val MOST_PATCH = 1 shl 10
        const val MOST_RESOLUTION = 1 shl 13
        const val MOST_SLICES = 1 shl 8
        const val MOST_COUNT = 1L shl 48
        val TOKEN_PATCHES = listOf(2, 4)
        val ROLES = listOf(PartRole.VISION_PREPARE, PartRole.VISION_TOWER)
    }
}
