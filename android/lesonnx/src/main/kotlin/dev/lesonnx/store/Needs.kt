package dev.lesonnx.store

import dev.lesonnx.BundleManifest
import dev.lesonnx.Dimension
import dev.lesonnx.Dtype
import dev.lesonnx.FixedStates
import dev.lesonnx.GROWTH_TOKENS
import dev.lesonnx.State
import dev.lesonnx.StepMemory

/** What ONNX Runtime and the virtual machine take beside what is counted, as in the runner. */
private const val SPARE_BYTES = 48L shl 20

/** What a bundle needs, from its manifest and the sizes of its files. */
internal fun needsOf(manifest: BundleManifest, files: Map<String, Long>): Needs {
    val kinds = manifest.expertKinds
    val perLayer = manifest.expertLayers.map { layer ->
        val shared = layer.sharedKind?.let { kinds[it].costBytes } ?: 0L
        LayerBytes(
            demand = layer.numExpertsPerTok * kinds[layer.kind].costBytes + shared,
            all = layer.numExperts * kinds[layer.kind].costBytes + shared,
        )
    }
    // dense.bin is the parts' external data: it lies beside them, and no part names it. Twins are there for accelerators alone.
    val twins = manifest.twins?.paths.orEmpty()
    val denseDirectories = manifest.allParts.map { it.path.substringBeforeLast('/', "") }.toSet()
    val drafterOfToken = manifest.drafter?.run { cacheSizes.values.sum() * Float.SIZE_BYTES } ?: 0
    val stateOfToken = manifest.states.filter { it.isAttention }.sumOf(::bytesOfToken) + drafterOfToken
    val firstTokens = minOf(GROWTH_TOKENS, manifest.model.maxPositionEmbeddings)
    return Needs(
        storage = files.values.sum(),
        dense = files.filterKeys { it.substringBeforeLast('/', "") in denseDirectories && it !in twins }.values.sum(),
        buffers = bufferBytes(manifest),
        firstStates = stateOfToken * firstTokens + FixedStates(manifest).numBytes,
        stateOfToken = stateOfToken,
        leastBudget = perLayer.maxOf { it.demand },
        tokenDemand = perLayer.sumOf { it.demand },
        experts = perLayer.sumOf { it.all },
    )
}

private class LayerBytes(val demand: Long, val all: Long)

/** What one token takes of an attention state. */
private fun bytesOfToken(state: State): Long {
    val size = when (state.dtype) {
        Dtype.INT8 -> 1L
        Dtype.FLOAT16 -> 2L
        else -> 4L
    }
    return state.shape.filterIsInstance<Dimension.Fixed>().fold(size) { bytes, dimension -> bytes * dimension.size }
}

/** The arrays of a prefill chunk as the runner counts them, those of drafts where the bundle brings a drafter, and the spare. */
private fun bufferBytes(manifest: BundleManifest): Long {
    val chunk = manifest.prefillChunkTokens.toInt()
    val layersRead = manifest.drafter?.targetLayerIds.orEmpty().size
    var arrays = 2 * StepMemory.bytesFor(manifest, chunk, layersRead) + chunk.toLong() * manifest.model.vocabSize / 8
    if (manifest.drafter != null) arrays += StepMemory.draftBytesFor(manifest, layersRead)
    return arrays + FixedStates(manifest).workingBytes(chunk) + SPARE_BYTES
}
