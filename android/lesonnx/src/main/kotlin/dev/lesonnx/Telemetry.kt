package dev.lesonnx

/**
 * Counts and times since the bundle was loaded, or since the last reset. Immutable: a picture of one moment.
 *
 * Loads are counted as they end; hits, late and misses once a layer and step. [lookaheadMs] is what the computing thread
 * waited for predictions, [stallMs] what it waited for reads.
 */
data class Telemetry(
    val loads: Long = 0,
    val hits: Long = 0,
    val late: Long = 0,
    val misses: Long = 0,
    val readBytes: Long = 0,
    val lookaheadLoads: Long = 0,
    val lookaheadUsed: Long = 0,
    val lookaheadWasted: Long = 0,
    val readMs: Double = 0.0,
    val stallMs: Double = 0.0,
    val expertMs: Double = 0.0,
    val lookaheadMs: Double = 0.0,
    val scheduleMs: Double = 0.0,
    val denseMs: Double = 0.0,
) {
    /** Share of required experts that were in memory, 0 to 1; 0 before anything ran. */
    val hitRate: Double get() = (hits + late + misses).let { if (it == 0L) 0.0 else hits.toDouble() / it }
}
