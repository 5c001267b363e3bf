package dev.lesonnx

import kotlin.test.assertEquals
import kotlin.test.assertFalse
import kotlin.test.assertTrue
import org.junit.jupiter.api.Test

/** The governor keeps lookahead where it is faster, drops it where it is not, and looks again. */
internal class GovernorTest {
    private val round = 2 * TRIAL_STEPS + HOLD_STEPS

    /** Run steps of which each takes what its side takes; which of them looked ahead. */
    private fun Governor.steps(count: Int, withIt: Double, without: Double): List<Boolean> = List(count) {
        wants().also { took(if (it) withIt else without) }
    }

    @Test
    fun `holds what is faster`() {
        for ((withIt, without, expected) in listOf(Triple(1.0, 1.2, true), Triple(1.2, 1.0, false))) {
            val looked = Governor().steps(round, withIt, without)
            assertEquals(List(2 * TRIAL_STEPS) { it % 2 == 0 }, looked.take(2 * TRIAL_STEPS))
            assertEquals(List(HOLD_STEPS) { expected }, looked.drop(2 * TRIAL_STEPS))
        }
    }

    @Test
    fun `near ties change nothing, and neither does an outlier`() {
        assertTrue(Governor().steps(round, 1.0 + MARGIN / 2, 1.0).drop(2 * TRIAL_STEPS).all { it })
        val governor = Governor()
        for (step in 0 until 2 * TRIAL_STEPS) governor.took(if (step == 0) 50.0 else if (governor.wants()) 1.0 else 1.1)
        assertTrue(governor.wants())
    }

    @Test
    fun `looks again`() {
        val governor = Governor()
        assertFalse(governor.steps(round, 1.3, 1.0).last())
        assertTrue(governor.steps(round, 1.0, 1.3).last())
    }
}
