package dev.lesonnx.store

import dev.lesonnx.BundleManifest
import dev.lesonnx.Dimension
import dev.lesonnx.Dtype
import dev.lesonnx.GROWTH_TOKENS
import dev.lesonnx.State
import dev.lesonnx.StepBuffers

/** Bytes of a float32. */
private const val FLOAT_BYTES = 4L

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
    // dense.bin is the parts' external data: it lies beside them, and no part names it.
    val denseDirectories = manifest.parts.map { it.path.substringBeforeLast('/', "") }.toSet()
    val stateOfToken = manifest.states.sumOf(::bytesOfToken)
    return Needs(
        storage = files.values.sum(),
        dense = files.filterKeys { it.substringBeforeLast('/', "") in denseDirectories }.values.sum(),
        buffers = bufferBytes(manifest),
        firstStates = stateOfToken * minOf(GROWTH_TOKENS.toLong(), manifest.model.maxPositionEmbeddings.toLong()),
        stateOfToken = stateOfToken,
        leastBudget = perLayer.maxOf { it.demand },
        tokenDemand = perLayer.sumOf { it.demand },
        experts = perLayer.sumOf { it.all },
    )
}

private class LayerBytes(val demand: Long, val all: Long)

/** What one token takes of an attention state. */
private fun bytesOfToken(state: State): Long {
    val size = if (state.dtype == Dtype.FLOAT16) FLOAT_BYTES / 2 else FLOAT_BYTES
    return state.shape.filterIsInstance<Dimension.Fixed>().fold(size) { bytes, dimension -> bytes * dimension.size }
}

/** The arrays of a prefill chunk as the runner counts them, and the spare. */
private fun bufferBytes(manifest: BundleManifest): Long {
    val chunk = manifest.prefillChunkTokens
    return 2 * StepBuffers.bytesFor(manifest, chunk.toInt()) + chunk * manifest.model.vocabSize / 8 + SPARE_BYTES
}
