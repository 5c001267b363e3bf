package dev.lesonnx.speculative

import dev.lesonnx.Bundle
import dev.lesonnx.ExpertLoader
import dev.lesonnx.InputError
import dev.lesonnx.IntList
import dev.lesonnx.LoadOptions
import dev.lesonnx.Ort
import dev.lesonnx.Platform
import dev.lesonnx.Prompt
import dev.lesonnx.Runner
import dev.lesonnx.Sampler.Distribution
import dev.lesonnx.makeEngine
import java.io.IOException
import java.nio.file.Files
import java.nio.file.Path
import java.security.MessageDigest

/**
 * The drafter `draft-model`: a second, smaller bundle with the same tokenizer, all of its experts in memory.
 *
 * It runs one token after another on its own sequence, which is rewound to what it has in common with the target's. It knows
 * nothing of the target but its tokens. Not thread-safe; owns that bundle's runner. [InputError] where the bundle's tokens are not
 * the target's.
 */
internal class DraftModelDrafter(target: Bundle, bundle: Bundle, platform: Platform, engine: String, numThreads: Int) : TokenDrafter {
    override val name = "draft-model"
    override val maxTokens = MAX_DRAFT_TOKENS
    override val isFree = false

    private val runner: Runner

    init {
        checkSameTokens(target, bundle)
        Ort.checkVersion(bundle.manifest.onnxruntimeAtLeast, Ort.environment(numThreads).version)
        val config = LoadOptions("resident").schedulerConfig()
        val made = makeEngine(engine, bundle, platform, numThreads)
        val loader = try {
            ExpertLoader(bundle, made, config, bundle.expertBytes, config.maxLoads)
        } catch (error: Throwable) {
            made.close()
            throw error
        }
        val chunk = minOf(bundle.manifest.prefillChunkTokens, bundle.manifest.model.maxPositionEmbeddings.toLong()).toInt()
        runner = try {
            Runner(bundle, loader, platform, chunk, numThreads)
        } catch (error: Throwable) {
            loader.close()
            throw error
        }
        try {
            // What its parts map counts as this process's before memory is shared out.
            runner.warmUp()
        } catch (error: Throwable) {
            runner.close()
            throw error
        }
    }

    /** Runs what the target's sequence has become since, then a token a step. */
    override fun propose(sequence: IntList, maxTokens: Int, sampler: DraftSampler): Draft {
        val most = minOf(maxTokens, this.maxTokens, runner.states.maxTokens - sequence.size)
        if (most < 1) return Draft.NONE
        val whole = sequence.toIntArray()
        runner.rewind(runner.commonTokens(Prompt(whole)))
        var logits = runner.prefill(whole.copyOfRange(runner.numTokens, whole.size))
        val tokenIds = IntArray(most)
        val distributions = ArrayList<Distribution>()
        sampler.proposal { choose ->
            for (slot in 0 until most) {
                val choice = choose(logits)
                tokenIds[slot] = choice.token
                choice.distribution?.let(distributions::add)
                if (slot + 1 < most) logits = runner.step(intArrayOf(choice.token), FIRST_ROW)
            }
        }
        return Draft(tokenIds, distributions.takeIf { sampler.draws })
    }

    /** Nothing to do before the next proposal, which compares sequences. */
    override fun rewind(numTokens: Int) = Unit

    override fun bytesAt(numTokens: Int): Long = runner.bytesAt(numTokens)

    override fun close() = runner.close()

    private companion object {
        val FIRST_ROW = intArrayOf(0)
    }
}

/** [InputError] where two bundles do not have the same vocabulary: its size, and the tokenizer's file where both have one. */
internal fun checkSameTokens(target: Bundle, bundle: Bundle) {
    val ours = target.manifest.model.vocabSize
    val theirs = bundle.manifest.model.vocabSize
    if (ours != theirs) throw InputError("${bundle.directory}: cannot draft: its vocabulary has $theirs tokens, the target's $ours")
    val files = listOfNotNull(tokenizerFile(target), tokenizerFile(bundle))
    if (files.size == 2 && !digest(files[0]).contentEquals(digest(files[1]))) {
        throw InputError("${bundle.directory}: cannot draft: its tokenizer is not the same as that of ${target.directory}")
    }
}

private fun tokenizerFile(bundle: Bundle): Path? = bundle.manifest.tokenizer?.jsonPath?.let(bundle::file)

private fun digest(path: Path): ByteArray = try {
    MessageDigest.getInstance("SHA-256").digest(Files.readAllBytes(path))
} catch (error: IOException) {
    throw InputError("$path: not readable: ${error.javaClass.simpleName}")
}
