package dev.lesonnx

/**
 * What the system says of memory becomes the model's expert budget: scarce memory evicts experts, plenty lets them return.
 *
 * A report takes effect between two steps, at once when nothing is being generated. Text does not depend on it, only speed.
 * Thread-safe, and quick: a report does not wait for what it causes.
 */
class MemoryPressure(private val model: Model) {
    /** How scarce memory is; [keep] is the share of the expert budget that stays, never less than a token needs of a layer. */
    enum class Level(internal val keep: Double) { NORMAL(1.0), MODERATE(0.75), LOW(0.5), CRITICAL(0.0) }

    /** Memory is as scarce as that, until the next report. */
    fun report(level: Level) = model.limitExperts(if (level == Level.NORMAL) null else (model.expertBudgetBytes * level.keep).toLong())
}
