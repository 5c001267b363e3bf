package dev.lesonnx

import dev.lesonnx.speculative.DraftCounts
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.fold

private const val DEFAULT_MAX_NEW_TOKENS = 256

/**
 * What to generate.
 *
 * @property maxNewTokens null: up to 256, less where the context ends earlier
 * @property sampling how tokens are chosen; greedy unless told
 * @property stop strings that end the text before themselves, wherever tokens begin and end
 * @property ignoreEos go on after an end-of-sequence token
 */
data class GenerationOptions(
    val maxNewTokens: Int? = null,
    val sampling: SamplingOptions = SamplingOptions(),
    val stop: List<String> = emptyList(),
    val ignoreEos: Boolean = false,
) {
    /** How many tokens may come after the prompt; [ContextError] where what was asked for does not fit. */
    internal fun tokenLimit(promptTokens: Int, maxTokens: Int): Int {
        val room = maxTokens - promptTokens
        if (room < 1) throw ContextError("a prompt of $promptTokens tokens leaves no room in the model's context of $maxTokens")
        val wanted = maxNewTokens ?: return minOf(DEFAULT_MAX_NEW_TOKENS, room)
        if (wanted < 1) throw InputError("max_new_tokens is $wanted, expected at least 1")
        if (wanted > room) {
            throw ContextError("a prompt of $promptTokens tokens and $wanted new ones do not fit the model's context of $maxTokens")
        }
        return wanted
    }
}

/**
 * One generated token. [text] is what became certain with it, perhaps nothing; all texts in a row are the output. [id] is null
 * for text that was held back until the end.
 */
data class Token(val id: Int?, val text: String)

/** Why a generation ended: an end-of-sequence token, a stop string, or the limit. */
enum class FinishReason { EOS, STOP, LENGTH }

/**
 * How a generation goes: a picture of one moment, immutable; that of the end has a [finishReason]. [drafts] is null where nothing could be
 * drafted. [visionMs] is what reading the prompt's pictures took, before its prefill; nothing where they were known.
 */
data class GenerationReport(
    val promptTokens: Int,
    val reusedTokens: Int = 0,
    val tokenIds: List<Int> = emptyList(),
    val finishReason: FinishReason? = null,
    val prefillMs: Double = 0.0,
    val decodeMs: Double = 0.0,
    val drafts: DraftCounts? = null,
    val pictures: Int = 0,
    val imageTokens: Int = 0,
    val visionMs: Double = 0.0,
) {
    /** Decode speed: tokens after the first, which the prefill gives, by the time they took. */
    val tokensPerS: Double
        get() = (tokenIds.size - 1).let { steps -> if (steps > 0 && decodeMs > 0) steps / (decodeMs / 1e3) else 0.0 }
}

/**
 * One generation: [tokens] as they come. Collecting runs it, on the model's own thread; collecting again runs it again, with
 * the same result. Cancelling the collector ends it after the step under way; the model stays usable.
 */
class Generation internal constructor(val tokens: Flow<Token>, private val progress: Progress) {
    /** How it goes; of the last collection that began. Any thread may ask. */
    val report: GenerationReport get() = progress.report()

    /** Runs to the end; gives the whole text. */
    suspend fun text(): String = tokens.fold(StringBuilder()) { text, token -> text.append(token.text) }.toString()

    /** What the model's thread writes and [report] shows. */
    internal class Progress(private val prompt: Prompt) {
        private val tokenIds = ArrayList<Int>()
        private var reusedTokens = 0
        private var visionMs = 0.0
        private var prefillMs = 0.0
        private var decodeMs = 0.0
        private var finishReason: FinishReason? = null
        private var drafts: DraftCounts? = null

        @Synchronized
        fun begin(reusedTokens: Int, drafts: DraftCounts?) {
            this.drafts = drafts
            tokenIds.clear()
            this.reusedTokens = reusedTokens
            visionMs = 0.0
            prefillMs = 0.0
            decodeMs = 0.0
            finishReason = null
        }

        /** The prompt's pictures are read. */
        @Synchronized
        fun seen(milliseconds: Double) {
            visionMs = milliseconds
        }

        @Synchronized
        fun prefilled(milliseconds: Double) {
            prefillMs = milliseconds
        }

        /** A token, that many milliseconds after the prefill; gives how many there are. */
        @Synchronized
        fun add(token: Int, milliseconds: Double): Int {
            tokenIds += token
            decodeMs = milliseconds
            return tokenIds.size
        }

        /** The drafts so far. */
        @Synchronized
        fun drafted(drafts: DraftCounts) {
            this.drafts = drafts
        }

        @Synchronized
        fun finish(reason: FinishReason) {
            finishReason = reason
        }

        @Synchronized
        fun report() = GenerationReport(
            prompt.size,
            reusedTokens,
            tokenIds.toList(),
            finishReason,
            prefillMs,
            decodeMs,
            drafts,
            pictures = prompt.pictures.size,
            imageTokens = prompt.numImageTokens,
            visionMs = visionMs,
        )
    }
}
