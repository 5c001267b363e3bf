package dev.lesonnx

import ai.onnxruntime.OrtSession

/**
 * The dense parts of a bundle as sessions, in the order in which a step runs them. It knows no tensor and no state.
 *
 * Lookahead parts are opened only if [usesLookahead]. [BundleError] for a part that ONNX Runtime does not take. Owned by a
 * runner, which closes it; not thread-safe.
 */
internal class DenseParts(bundle: Bundle, usesLookahead: Boolean, numThreads: Int) : AutoCloseable {
    private val manifest = bundle.manifest
    private val sessions = HashMap<String, OrtSession>()

    val embed = manifest.part(PartRole.EMBED)
    val segments = manifest.parts.filter { it.role == PartRole.SEGMENT }

    /** By the number of the MoE layer: what runs behind a router that speaks before its layer mixes tokens. */
    val mixers: List<Part?> = segments.map { segment ->
        manifest.parts.find { it.role == PartRole.MIXER && it.layerIdx == segment.layerIdx }
    }

    /** By the number of the MoE layer before, from which they look. */
    val lookaheads = if (usesLookahead) segments.drop(1).map { manifest.part(PartRole.LOOKAHEAD, it.layerIdx) } else emptyList()
    val head = manifest.part(PartRole.HEAD)

    /** Whether the head must run in every step. */
    val headCarriesStates = manifest.states.any { it.part == head.name }

    init {
        try {
            Ort.sessionOptions(optimise = true, numThreads).use { options ->
                // A lookahead is a row of a router, run beside the experts.
                Ort.sessionOptions(optimise = true, numThreads = 1).use { single ->
                    for (part in manifest.parts) {
                        if (part.role == PartRole.LOOKAHEAD && !usesLookahead) continue
                        val file = bundle.file(part.path)
                        sessions[part.name] = Ort.openSession(file, if (part.role == PartRole.LOOKAHEAD) single else options)
                    }
                }
            }
        } catch (error: Throwable) {
            close()
            throw error
        }
    }

    /** A part bound to tensors, by the names that it gives them. */
    fun bind(name: String, inputs: Map<String, Tensor>, outputs: Map<String, Tensor>): Binding =
        Binding(sessions.getValue(name), inputs.mapValues { it.value.onnx }, outputs.mapValues { it.value.onnx })

    override fun close() {
        sessions.values.forEach(OrtSession::close)
        sessions.clear()
    }
}
