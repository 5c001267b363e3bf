package dev.lesonnx

/** Steps of each side of a trial. A side that loses by 12 % costs 1.3 % in all. */
internal const val TRIAL_STEPS = 8

/** How many steps the outcome of a trial holds. */
internal const val HOLD_STEPS = 128

/** The side in force stays unless the other is this much faster: medians of a few steps are rough. */
internal const val MARGIN = 0.02

/**
 * Whether looking ahead pays here and now: tried against going without, by the clock, again and again. A prediction costs
 * processor time; where cores are busy or reads are quick it can cost more than the waiting it hides. Tokens do not depend
 * on it.
 *
 * A round is [TRIAL_STEPS] steps with and as many without, in turns, since a cache that warms up makes each step faster than
 * the one before; then [HOLD_STEPS] with what was faster. It knows steps and their times, not what a prediction is. Owned by
 * one runner, not thread-safe.
 */
class Governor {
    /** The side that was faster in the last round. */
    var isOn = true
        private set
    private var step = 0
    private val withIt = DoubleArray(TRIAL_STEPS)
    private val without = DoubleArray(TRIAL_STEPS)

    /** Whether the coming step should look ahead. */
    fun wants(): Boolean = if (step < 2 * TRIAL_STEPS) step % 2 == 0 else isOn

    /** The step that [wants] spoke of took that long. */
    fun took(seconds: Double) {
        if (step < 2 * TRIAL_STEPS) (if (wants()) withIt else without)[step / 2] = seconds
        step++
        if (step == 2 * TRIAL_STEPS) decide()
        if (step == 2 * TRIAL_STEPS + HOLD_STEPS) step = 0
    }

    private fun decide() {
        val mine = median(if (isOn) withIt else without)
        val other = median(if (isOn) without else withIt)
        if (other < mine * (1 - MARGIN)) isOn = !isOn
    }

    private fun median(times: DoubleArray): Double {
        val sorted = times.sortedArray()
        return (sorted[sorted.size / 2 - 1] + sorted[sorted.size / 2]) / 2
    }
}
