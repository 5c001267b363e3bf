package dev.lesonnx

import dev.lesonnx.speculative.NO_DRAFTER
import dev.lesonnx.speculative.checkDrafter
import java.nio.file.Path

/** Reads under way at once, where the schedule does not say otherwise. */
const val DEFAULT_LOADERS = 4
private const val MAX_LOADERS = 64
private const val MAX_THREADS = 256

/** The names that [LoadOptions.schedule] takes. */
val SCHEDULES: List<String> = listOf("on-demand", "cache", "les", "resident")

/**
 * How a bundle is run. None of these changes what the model says ([prefillChunkTokens] and [draft] may change rounding; drafts that
 * are drawn, of `draft-model` and `dspark` with a temperature, give other tokens of the same distribution; twins of [accelerate] round
 * otherwise).
 *
 * @property schedule `les` (default), `cache`, `on-demand` or `resident`: how experts get into memory
 * @property engine `auto`, `kernel` or `session`: what computes them
 * @property numLoaders reads under way at once; null: as the schedule has it
 * @property policy `les`, `lru` or `lfu`: which expert gives way; null: as the schedule has it
 * @property computeFirst compute what is in memory while the rest loads; null: as the schedule has it
 * @property lookahead load what the next layer will probably need; null: as the schedule has it, and only while it pays
 * @property expertBudgetBytes bounds the expert cache, exactly; null: all experts may be in memory
 * @property memoryBudgetBytes bounds the process: experts get what runtime, dense parts, attention caches and buffers leave
 * @property prefillChunkTokens the chunk in which a prompt runs; null: the bundle's
 * @property numThreads threads that compute; null: one a core. The first model loaded in a process decides how many the common pool has
 * @property draft what proposes tokens that are then verified several at a time: `none` (default), `ngram`, `draft-model`, `dspark` or
 *   `mtp`; see [dev.lesonnx.speculative.DRAFTERS]
 * @property draftModel the bundle that drafts, of `draft-model` alone
 * @property accelerate `auto` (default): the bundle's twins of dense parts run where their execution providers are installed; `off`: never;
 *   `cpu`: on the CPU provider, to try them
 */
data class LoadOptions(
    val schedule: String = "les",
    val engine: String = "auto",
    val numLoaders: Int? = null,
    val policy: String? = null,
    val computeFirst: Boolean? = null,
    val lookahead: Boolean? = null,
    val expertBudgetBytes: Long? = null,
    val memoryBudgetBytes: Long? = null,
    val prefillChunkTokens: Int? = null,
    val numThreads: Int? = null,
    val draft: String = NO_DRAFTER,
    val draftModel: Path? = null,
    val accelerate: String = "auto",
) {
    /** [InputError] for a number or a drafter that no model can be run with. */
    internal fun check() {
        if (prefillChunkTokens != null && prefillChunkTokens < 1) {
            throw InputError("prefill chunk is $prefillChunkTokens tokens, expected at least 1")
        }
        if (numThreads != null && numThreads !in 1..MAX_THREADS) throw InputError("num_threads is $numThreads, expected 1 to $MAX_THREADS")
        if (numLoaders != null && numLoaders !in 1..MAX_LOADERS) throw InputError("num_loaders is $numLoaders, expected 1 to $MAX_LOADERS")
        checkDrafter(draft, draftModel)
        if (accelerate !in ACCELERATIONS) throw InputError("accelerate is '$accelerate', expected one of ${ACCELERATIONS.joinToString()}")
    }

    /** The schedule's settings with the changes to them; [InputError] for a bad one. */
    internal fun schedulerConfig(): SchedulerConfig {
        val config = when (schedule) {
            "on-demand" -> SchedulerConfig.ON_DEMAND
            "cache" -> SchedulerConfig(policy = "lru", maxLoads = DEFAULT_LOADERS, computeFirst = false, lookahead = false)
            "les" -> SchedulerConfig(maxLoads = DEFAULT_LOADERS)
            "resident" -> SchedulerConfig(maxLoads = DEFAULT_LOADERS, resident = true, lookahead = false)
            else -> throw InputError("schedule '$schedule' is not one of ${SCHEDULES.joinToString()}")
        }
        if (policy != null && policy !in POLICIES) throw InputError("policy '$policy' is not one of ${POLICIES.joinToString()}")
        if (lookahead == true && !config.retain) {
            throw InputError("schedule $schedule keeps nothing, so there is nothing to look ahead for")
        }
        return config.copy(
            policy = policy ?: config.policy,
            maxLoads = numLoaders ?: config.maxLoads,
            computeFirst = computeFirst ?: config.computeFirst,
            lookahead = lookahead ?: config.lookahead,
        )
    }
}
