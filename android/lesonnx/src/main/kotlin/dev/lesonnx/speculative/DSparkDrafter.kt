package dev.lesonnx.speculative

import ai.onnxruntime.OrtSession
import dev.lesonnx.Binding
import dev.lesonnx.Bundle
import dev.lesonnx.InputError
import dev.lesonnx.IntList
import dev.lesonnx.Ort
import dev.lesonnx.PartRole
import dev.lesonnx.Platform
import dev.lesonnx.Sampler.Distribution
import dev.lesonnx.Tensor

/**
 * The drafter `dspark` of a bundle: a block of tokens in one pass over what the target's layers gave, then slot by slot.
 *
 * It keeps keys and values of every token that the target ran, projected from the outputs of some of its layers; the block's own
 * are dropped after each draft. It knows nothing of verification or price; `docs/bundle.md` has its parts. Not thread-safe. Owns
 * three sessions, its context and its buffers. [InputError] where the bundle has no drafter.
 */
internal class DSparkDrafter(bundle: Bundle, platform: Platform, numThreads: Int) : Drafter {
    private val record = bundle.manifest.drafter
        ?: throw InputError("${bundle.directory}: this bundle has no dspark drafter; export with --drafter CHECKPOINT")

    override val name = "dspark"
    override val maxTokens = minOf(record.blockSize, MAX_DRAFT_TOKENS)
    override val isFree = false
    override val layerIdxs = record.targetLayerIds

    private val sessions = HashMap<PartRole, OrtSession>()
    private val context: DSparkContext
    private val block: DSparkBlock

    init {
        val model = bundle.manifest.model
        val opened = ArrayList<AutoCloseable>()
        try {
            Ort.sessionOptions(optimise = true, numThreads).use { options ->
                for (part in record.parts) sessions[part.role] = Ort.openSession(bundle.partFile(part), options).also(opened::add)
            }
            context = DSparkContext(record, model, platform, ::bind).also(opened::add)
            block = DSparkBlock(record, model, platform, ::bind).also(opened::add)
            warmUp()
        } catch (error: Throwable) {
            opened.asReversed().forEach(AutoCloseable::close)
            throw error
        }
    }

    private fun bind(role: PartRole, inputs: Map<String, Tensor>, outputs: Map<String, Tensor>): Binding =
        Binding(sessions.getValue(role), inputs.mapValues { it.value.onnx }, outputs.mapValues { it.value.onnx })

    /** As the drafter's, and what it had from [position] on is forgotten. IllegalStateException where tokens before it are missing. */
    override fun observe(position: Int, layerOutputs: Tensor) = context.observe(position, layerOutputs)

    /** Forgets what comes behind the first [numTokens] tokens: two numbers, nothing is moved. */
    override fun rewind(numTokens: Int) = context.rewind(numTokens)

    override fun bytesAt(numTokens: Int): Long = context.bytesAt(numTokens)

    /**
     * Runs every part once on nothing: the weights that it maps count as this process's before memory is shared out, and the first
     * draft takes no longer than others.
     */
    private fun warmUp() = context.warmUp { caches ->
        block.run(anchor = 0, start = 1, count = maxTokens, caches)
        for (slot in 0 until maxTokens) block.slot(slot, before = 0)
    }

    /** IllegalStateException where it has not seen what the target gave for all but the last of [sequence]. */
    override fun propose(sequence: IntList, maxTokens: Int, sampler: DraftSampler): Draft {
        val start = sequence.size - 1
        val count = minOf(maxTokens, this.maxTokens)
        check(start <= context.numTokens) { "the drafter has seen ${context.numTokens} tokens, expected $start" }
        context.rewind(start)
        val tokenIds = IntArray(count)
        val confidence = IntArray(count)
        val distributions = ArrayList<Distribution>()
        var before = sequence[start]
        context.withCaches { caches -> block.run(before, start, count, caches) }
        sampler.proposal { choose ->
            for (slot in 0 until count) {
                val choice = choose(block.slot(slot, before))
                before = choice.token
                tokenIds[slot] = before
                choice.distribution?.let(distributions::add)
                confidence[slot] = fixedConfidence(block.confidence.toDouble())
            }
        }
        return Draft(tokenIds, distributions.takeIf { sampler.draws }, confidence.takeIf { record.hasConfidence })
    }

    override fun close() {
        block.close()
        context.close()
        sessions.values.forEach(OrtSession::close)
        sessions.clear()
    }
}
