package dev.lesonnx

import dev.lesonnx.speculative.DraftCounts
import dev.lesonnx.speculative.Speculator
import dev.lesonnx.speculative.makeDrafter
import dev.lesonnx.vision.Picture
import dev.lesonnx.vision.PicturePrompts
import dev.lesonnx.vision.Sight
import kotlinx.coroutines.CancellationException
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.currentCoroutineContext
import kotlinx.coroutines.ensureActive
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.FlowCollector
import kotlinx.coroutines.flow.buffer
import kotlinx.coroutines.flow.catch
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.flow.flowOn
import kotlinx.coroutines.yield
import java.nio.file.Path
import java.util.concurrent.ExecutionException
import java.util.concurrent.RejectedExecutionException
import java.util.concurrent.atomic.AtomicReference
import java.util.concurrent.locks.ReentrantReadWriteLock
import kotlin.concurrent.read
import kotlin.concurrent.write

/**
 * A loaded bundle: [load] one, [generate] from it, close it.
 *
 * Everything that computes runs on a thread of the model's own, so any thread may call; there is one sequence, and a generation
 * that begins ends the one before it (which then throws IllegalStateException). Owns sessions, experts, attention caches and
 * the tokenizer; [close] frees them all.
 */
class Model private constructor(
    val bundle: Bundle,
    val options: LoadOptions,
    private val runner: Runner,
    private val speculator: Speculator?,
    private val tokenizer: Tokenizer?,
    private val sight: Sight?,
    /** The engine in use: `kernel` or `session`. */
    val engineName: String,
    /** What is worth a line to the user: why an engine was taken, a budget that is narrow. */
    val notes: List<String>,
) : AutoCloseable {
    private val worker = Workers("lesonnx compute", 1)

    /** Stands for the collection that may run: a generation can be collected again. Touched on the model's thread only. */
    private var owner: Any? = null

    /**
     * Where the sequence ends for whoever reads its tokens: before the last of them, which has not run. Tokens that were drafted may have
     * run behind it, if the generation ended or was cancelled among them. Touched on the model's thread only.
     */
    private var sequenceEnd = 0

    /** Whether everything is freed; touched on the model's thread only, where a generation may still wait for its turn. */
    private var isFreed = false

    /** Held for reading by whoever encodes a text, on any thread: closing must not free the tokenizer under it. */
    private val encoding = ReentrantReadWriteLock()
    private var isClosing = false

    /** The limit of the experts that waits for the model's thread. */
    private val coming = AtomicReference<Limit?>()

    private class Limit(val numBytes: Long?)

    /** The expert budget when the model was loaded; the system's pressure may hold less of it. */
    val expertBudgetBytes: Long = runner.loader.expertBudgetBytes

    /** Loads, bytes and times since the bundle was loaded. Any thread may ask, also after [close]. */
    val telemetry: Telemetry get() = runner.loader.telemetry

    /** Whether [generate] takes text: without a tokenizer it takes token ids. */
    val hasTokenizer: Boolean get() = tokenizer != null

    /** Why prompts (of a [chat], where there is one) cannot have pictures; null where they can. */
    val whyNoPictures: String?
        get() {
            val vision = bundle.manifest.vision ?: return "this bundle has no eyes: it takes no pictures"
            if (tokenizer == null) return "this bundle has no tokenizer, which a prompt with pictures needs"
            return if (hasChat && vision.texts.separator == null) "this bundle's chat format has no place for pictures" else null
        }

    private val picturePrompts: PicturePrompts? = bundle.manifest.vision?.takeIf { tokenizer != null }?.let { PicturePrompts(it, ::encode) }

    /** Whether [chat] can be used: else offer completion. */
    val hasChat: Boolean get() = tokenizer != null && bundle.manifest.tokenizer?.chatFormat != null

    /**
     * A text's token ids, as [generate] makes them; [InputError] where the bundle has no tokenizer. Runs on the calling thread, and takes
     * long for a long text.
     */
    fun encode(text: String, addSpecialTokens: Boolean = true): IntArray = encoding.read {
        check(!isClosing) { CLOSED }
        (tokenizer ?: throw InputError("${bundle.directory}: has no tokenizer; give token ids instead of text")).encode(text, addSpecialTokens)
    }

    /**
     * Generates from a text, from scratch; it has one placeholder for each of [images], in order, or none: then they come first. Throws
     * [InputError] or [ContextError] for what cannot be served, before any work; the text is encoded on the calling thread to know that.
     */
    fun generate(prompt: String, options: GenerationOptions = GenerationOptions(), images: List<Picture> = emptyList()): Generation {
        val text = if (images.isEmpty()) prompt else picturePrompts().withPlaceholders(prompt, images.size)
        return generation(promptOf(text, images, addSpecialTokens = true), options, reuse = false)
    }

    /** Generates from token ids, from scratch, with one image token for each of [images]; without a tokenizer, texts are empty. */
    fun generate(promptIds: IntArray, options: GenerationOptions = GenerationOptions(), images: List<Picture> = emptyList()): Generation =
        generation(if (images.isEmpty()) Prompt(promptIds) else picturePrompts().ofIds(promptIds, images), options, reuse = false)

    /**
     * Answers a conversation by the bundle's chat format; what the last answer computed is used again. [InputError] without one, and for
     * pictures where the format has none.
     */
    fun chat(messages: List<ChatMessage>, options: GenerationOptions = GenerationOptions()): Generation {
        val format = bundle.manifest.tokenizer?.chatFormat
            ?: throw InputError("${bundle.directory}: has no chat format; use generate, which completes a text")
        val text = format.render(messages.map { if (it.images.isEmpty()) it else it.copy(content = picturePrompts().content(it.content, it.images.size)) })
        return generation(promptOf(text, messages.flatMap { it.images }, addSpecialTokens = false), options, reuse = true)
    }

    private fun promptOf(text: String, images: List<Picture>, addSpecialTokens: Boolean): Prompt = when {
        images.isEmpty() && picturePrompts == null -> Prompt(encode(text, addSpecialTokens))
        else -> picturePrompts().ofText(text, images, addSpecialTokens)
    }

    /** [InputError] where pictures cannot be taken. */
    private fun picturePrompts(): PicturePrompts = picturePrompts ?: throw InputError("${bundle.directory}: $whyNoPictures")

    /** [reuse]: what the sequence begins with already is not computed again. */
    internal fun generation(prompt: Prompt, options: GenerationOptions, reuse: Boolean): Generation {
        val promptIds = prompt.tokenIds
        checkPrompt(promptIds, bundle.manifest.model.vocabSize)
        val limit = options.tokenLimit(promptIds.size, runner.states.maxTokens)
        if (options.stop.isNotEmpty() && tokenizer == null) throw InputError("stop strings need a tokenizer, which this bundle lacks")
        StopChecker(options.stop)
        check(!worker.executor.isShutdown) { CLOSED }
        val progress = Generation.Progress(prompt)
        // Without room between them the collector is never more than a token behind: what it sees is what was computed.
        val tokens = flow { steps(prompt, limit, options, reuse, progress) }.buffer(Channel.RENDEZVOUS).flowOn(worker.dispatcher)
        return Generation(tokens.catch { error -> throw closedInstead(error) }, progress)
    }

    /**
     * A thread that has ended cancels the flow on it. The collector has not been cancelled, so that must not look as if it had: a
     * coroutine that meets a CancellationException ends without a word.
     */
    private fun closedInstead(error: Throwable): Throwable =
        if (error is CancellationException && worker.executor.isShutdown) IllegalStateException(CLOSED, error) else error

    /** The generation itself: prefill, then a step at a time, which gives a token, or several where drafts are right. Runs on the model's thread. */
    private suspend fun FlowCollector<Token>.steps(
        prompt: Prompt,
        limit: Int,
        options: GenerationOptions,
        reuse: Boolean,
        progress: Generation.Progress,
    ) {
        val context = currentCoroutineContext()
        val promptIds = prompt.tokenIds
        val eos = if (options.ignoreEos) emptySet() else bundle.manifest.model.eosTokenIds.toSet()
        val sampler = Sampler(options.sampling)
        sampler.acceptAll(promptIds)
        val decoder = tokenizer?.let(::StreamDecoder)
        val stop = StopChecker(options.stop)

        // 1. The prompt, but for what the sequence begins with already. Its last token always runs: it gives the logits.
        check(!isFreed) { CLOSED }
        val self = Any()
        owner = self
        val reused = if (reuse) runner.commonTokens(prompt, sequenceEnd) else 0
        progress.begin(reused, speculator?.let { DraftCounts() })
        val before = sight?.readNs ?: 0
        val seen = see(prompt, reused) { context.ensureActive() }
        progress.seen(((sight?.readNs ?: 0) - before) / NS_PER_MS)
        runner.rewind(reused)
        sequenceEnd = reused
        speculator?.begin(promptIds, reused, sampler)
        var began = System.nanoTime()
        val logits = runner.prefill(seen) {
            sequenceEnd = runner.numTokens
            context.ensureActive()
        }
        sequenceEnd = promptIds.size
        progress.prefilled((System.nanoTime() - began) / NS_PER_MS)

        // 2. Token by token, until the end-of-sequence token, a stop string or the limit.
        began = System.nanoTime()
        var coming = intArrayOf(sampler.sample(logits))
        var place = 0
        while (true) {
            val token = coming[place++]
            val count = progress.add(token, (System.nanoTime() - began) / NS_PER_MS)
            sequenceEnd = promptIds.size + count - 1
            if (token in eos) {
                progress.finish(FinishReason.EOS)
                break
            }
            sampler.accept(token)
            val text = if (decoder == null) "" else stop.push(decoder.push(token))
            val reason = if (stop.stoppedBy != null) FinishReason.STOP else FinishReason.LENGTH.takeIf { count == limit }
            // Before the last text is handed on: while the collector has it, the generation may be collected anew.
            reason?.let(progress::finish)
            emit(Token(token, text))
            if (reason == FinishReason.STOP) return
            if (reason == FinishReason.LENGTH) break
            // A collector that waits already lets emit go on without a pause: here what else was asked of this thread has its turn,
            // a limit of the experts or closing, and a cancelled generation ends.
            yield()
            check(!isFreed) { CLOSED }
            check(owner === self) { "another generation has begun with this model" }
            if (place == coming.size) {
                place = 0
                coming = nextTokens(token, limit - count, sampler, eos)
                speculator?.let { progress.drafted(it.counts) }
            }
        }

        // 3. What was held back: half a character, or the beginning of a stop string.
        if (decoder != null) {
            val text = stop.push(decoder.flush()) + stop.flush()
            if (text.isNotEmpty()) emit(Token(null, text))
        }
    }

    /** The prompt with the features of its pictures that come after the first [reused] tokens. */
    private fun see(prompt: Prompt, reused: Int, beforeCrop: () -> Unit): Prompt {
        val pictures = prompt.picturesAfter(reused)
        return if (pictures.isEmpty()) prompt else prompt.seen(checkNotNull(sight).see(pictures, beforeCrop))
    }

    /** What comes after [token], which has not run: one token, or up to [most]. */
    private fun nextTokens(token: Int, most: Int, sampler: Sampler, ends: Set<Int>): IntArray =
        speculator?.next(token, most, ends) ?: intArrayOf(sampler.sample(runner.step(intArrayOf(token), LAST_ROW)))

    /** Limits the experts, between two steps; null lifts that. What it meets, the next step reports. */
    internal fun limitExperts(numBytes: Long?) {
        // Only the last limit counts: however many come, one waits, and the steps have their turn.
        if (coming.getAndSet(Limit(numBytes)) != null) return
        try {
            worker.executor.execute {
                try {
                    coming.getAndSet(null)?.let { runner.limitExperts(it.numBytes) }
                } catch (_: LesonnxError) {
                    // The loader keeps it: no further step begins.
                }
            }
        } catch (_: RejectedExecutionException) {
            // Closed: nothing is left to limit.
        }
    }

    /**
     * Waits for the step under way and for texts that are being encoded, then frees everything. A flow that is still collected ends with
     * IllegalStateException, as does every later call. Closing twice is nothing.
     */
    override fun close() {
        check(!worker.areCalling) { "a model cannot be closed from its own thread" }
        encoding.write { isClosing = true }
        val freed = try {
            worker.executor.submit {
                isFreed = true
                speculator?.close()
                runner.close()
                tokenizer?.close()
            }
        } catch (_: RejectedExecutionException) {
            return
        }
        worker.close()
        try {
            freed.get()
        } catch (error: ExecutionException) {
            throw error.cause ?: error
        }
    }

    companion object {
        private const val NS_PER_MS = 1e6
        private const val CLOSED = "the model is closed"
        private val LAST_ROW = intArrayOf(0)

        /**
         * Loads a bundle, on the calling thread: seconds for a large one, so not the one that draws.
         *
         * Throws [BundleError] for a bundle that cannot be run, [BudgetError] for too small a budget, [InputError] for an option.
         */
        fun load(directory: Path, platform: Platform, options: LoadOptions = LoadOptions()): Model = load(Bundle(directory), platform, options)

        /** The same from a bundle that is open already. */
        fun load(bundle: Bundle, platform: Platform, options: LoadOptions = LoadOptions()): Model =
            load(bundle, platform, options) { runner, numThreads ->
                makeDrafter(options.draft, bundle, options.draftModel, platform, options.engine, numThreads)?.let { Speculator(runner, it) }
            }

        /** The same with the speculator that [speculate] makes for the runner. */
        internal fun load(bundle: Bundle, platform: Platform, options: LoadOptions, speculate: (Runner, numThreads: Int) -> Speculator?): Model {
            options.check()
            val config = options.schedulerConfig()
            val budget = options.expertBudgetBytes ?: bundle.expertBytes
            checkBudget(bundle, budget, config)
            val numThreads = options.numThreads ?: Runtime.getRuntime().availableProcessors()
            Ort.checkVersion(bundle.manifest.onnxruntimeAtLeast, Ort.environment(numThreads).version)
            val engine = makeEngine(options.engine, bundle, platform, numThreads)
            val context = bundle.manifest.model.maxPositionEmbeddings
            val chunk = minOf(options.prefillChunkTokens?.toLong() ?: bundle.manifest.prefillChunkTokens, context.toLong()).toInt()
            val loader = closeOnError(engine) { ExpertLoader(bundle, engine, config, budget, config.maxLoads) }
            val twins = closeOnError(loader) { Twins(bundle, platform, options.accelerate, numThreads) }
            val runner = closeOnError(loader) { closeOnError(twins) { Runner(bundle, loader, platform, chunk, numThreads, twins) } }
            return closeOnError(runner) {
                if (config.lookahead && options.lookahead == null) runner.governor = Governor()
                // Before the memory is bounded: a draft model takes its part of it.
                val speculator = speculate(runner, numThreads)
                closeOnError(speculator) {
                    options.memoryBudgetBytes?.let { runner.boundMemory(it, drafts = speculator != null) }
                    val tokenizer = platform.openTokenizer(bundle)
                    val sight = bundle.manifest.vision?.let { Sight(bundle, it, platform, numThreads, borrow = runner::borrow) }
                    Model(bundle, options, runner, speculator, tokenizer, sight, engine.name, engine.notes + twins.notes + notes(bundle, loader, config))
                }
            }
        }

        private fun <T> closeOnError(owned: AutoCloseable?, make: () -> T): T = try {
            make()
        } catch (error: Throwable) {
            owned?.close()
            throw error
        }

        private fun checkBudget(bundle: Bundle, budgetBytes: Long, config: SchedulerConfig) {
            val least = if (config.resident) bundle.expertBytes else bundle.leastBudgetBytes
            if (budgetBytes >= least) return
            val what = if (config.resident) "schedule resident keeps all experts," else "this bundle needs at least"
            throw BudgetError("the expert budget is $budgetBytes bytes; $what $least")
        }

        private fun notes(bundle: Bundle, loader: ExpertLoader, config: SchedulerConfig): List<String> {
            if (!config.retain || loader.expertBudgetBytes >= bundle.tokenDemandBytes) return emptyList()
            return listOf(
                "the experts may take ${loader.expertBudgetBytes} bytes, less than the ${bundle.tokenDemandBytes} that one token uses:" +
                    " few can stay from one token to the next",
            )
        }

        /** [InputError] for a prompt without tokens or with one that the model does not know. */
        private fun checkPrompt(promptIds: IntArray, vocabSize: Int) {
            if (promptIds.isEmpty()) throw InputError("the prompt is empty: at least one token is needed")
            for (id in promptIds) if (id !in 0 until vocabSize) throw InputError("token id $id is outside 0..${vocabSize - 1}")
        }
    }
}
