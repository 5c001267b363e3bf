package dev.lesonnx

/** One MoE layer. [costBytes]: an expert's length in the pack, in whole pages; [sharedCostBytes] 0: no shared expert. */
data class LayerShape(
    val numExperts: Int,
    val numExpertsPerTok: Int,
    val costBytes: Long,
    val sharedCostBytes: Long = 0,
)

/**
 * Which techniques of the scheduler are on.
 *
 * @property policy what an expert in memory is worth: `les`, `lru` or `lfu`
 * @property maxLoads loads under way at once
 * @property computeFirst compute what is ready while the rest loads
 * @property lookaheadLoads most speculative loads under way
 * @property lookaheadBytes most speculative bytes queued and under way; 0: eight of the largest experts
 * @property lookaheadOdds least odds, of [ONE], to load a prediction
 * @property retain keep experts after use
 * @property resident load every expert at the start and keep it
 * @property slabBytes the longest buffer of the cache
 */
data class SchedulerConfig(
    val policy: String = "les",
    val maxLoads: Int = 4,
    val computeFirst: Boolean = true,
    val lookahead: Boolean = true,
    val lookaheadLoads: Int = 1,
    val lookaheadBytes: Long = 0,
    val lookaheadOdds: Int = ONE * 5 / 8,
    val retain: Boolean = true,
    val resident: Boolean = false,
    val slabBytes: Long = SLAB_BYTES,
) {
    companion object {
        /** Keeps nothing and loads one expert at a time. */
        val ON_DEMAND =
            SchedulerConfig(policy = "lru", maxLoads = 1, computeFirst = false, lookahead = false, retain = false)
    }
}

/** What the scheduler wants done; experts by their number (see [Scheduler]). Immutable. */
sealed interface Action {
    /** Read the expert to this place; report [Scheduler.loaded] or [Scheduler.loadFailed]. */
    data class Load(val expert: Int, val lookahead: Boolean, val slab: Int, val offsetBytes: Int) : Action

    /** The expert's place is free; a load that comes later may take it. */
    data class Evict(val expert: Int) : Action

    /** Compute these experts, each with all its rows; report [Scheduler.computed] with the same. Do not change the array. */
    class Compute(val experts: IntArray) : Action {
        override fun equals(other: Any?): Boolean = other is Compute && experts.contentEquals(other.experts)

        override fun hashCode(): Int = experts.contentHashCode()

        override fun toString(): String = "Compute(experts=${experts.contentToString()})"
    }

    /** Record: a lookahead load, queued or under way, has become a demand load. */
    data class Promote(val expert: Int) : Action

    /** Record: a lookahead load that had not started, or that failed, is dropped. */
    data class Cancel(val expert: Int) : Action
}

/** Totals since the start. Required experts count once a layer and step, shared ones too; bytes as loads begin. */
data class Counters(
    var hits: Long = 0,
    var late: Long = 0,
    var misses: Long = 0,
    var demandBytes: Long = 0,
    var lookaheadBytes: Long = 0,
    var lookaheadLoads: Long = 0,
    var lookaheadUsed: Long = 0,
    var lookaheadWasted: Long = 0,
    var evictions: Long = 0,
)
