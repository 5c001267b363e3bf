package dev.lesonnx

/** Why an expert is read: a layer requires it, or a prediction names it. */
internal enum class LoadKind { DEMAND, LOOKAHEAD }

/** The loads under way, by expert: why they run, and which of them say how quick reads are. Not thread-safe, the scheduler's. */
internal class LoadsUnderWay(numExperts: Int) {
    private val kinds = arrayOfNulls<LoadKind>(numExperts)
    private val timings = Array(numExperts) { Timing.NONE }

    /** What a demand load's time tells: nothing, the usual, or the price of a speculative read beside it. */
    enum class Timing { NONE, ALONE, BESIDE_SPECULATION }

    var count = 0
        private set

    var numSpeculative = 0
        private set

    /** The expert's load begins. */
    fun begin(expert: Int, kind: LoadKind) {
        kinds[expert] = kind
        count++
        if (kind == LoadKind.LOOKAHEAD) {
            numSpeculative++
        } else {
            timings[expert] = if (numSpeculative > 0) Timing.BESIDE_SPECULATION else Timing.ALONE
        }
    }

    /** The expert's load begins again: its time says nothing of speed. */
    fun repeat(expert: Int) {
        kinds[expert] = LoadKind.DEMAND
        timings[expert] = Timing.NONE
        count++
    }

    /** The expert's load has ended; ScheduleError where none was under way. */
    fun end(expert: Int): LoadKind {
        val kind = kinds.getOrNull(expert) ?: throw ScheduleError("expert $expert is not being loaded")
        kinds[expert] = null
        count--
        if (kind == LoadKind.LOOKAHEAD) numSpeculative--
        return kind
    }

    /** Whether it is a lookahead load, which is now a demand load. */
    fun promote(expert: Int): Boolean {
        if (kinds[expert] != LoadKind.LOOKAHEAD) return false
        kinds[expert] = LoadKind.DEMAND
        numSpeculative--
        return true
    }

    /** What the time of the expert's read tells; once. */
    fun takeTiming(expert: Int): Timing = timings[expert].also { timings[expert] = Timing.NONE }
}
