package dev.lesonnx

import dev.lesonnx.Action.Cancel
import dev.lesonnx.Action.Compute
import dev.lesonnx.Action.Evict
import dev.lesonnx.Action.Load
import dev.lesonnx.Action.Promote
import java.nio.FloatBuffer
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertTrue
import org.junit.jupiter.api.Test

/** Single behaviours of the scheduler; experts are a page each. */
internal class SchedulerTest {
    private val page = PAGE_BYTES
    private val demandOnly = SchedulerConfig(lookahead = false)

    /** Layers of 4 experts, 2 a token. */
    private fun small(budgetExperts: Int, config: SchedulerConfig = demandOnly, numLayers: Int = 2) =
        Scheduler(List(numLayers) { LayerShape(4, 2, page.toLong()) }, budgetExperts.toLong() * page, config)

    private fun rows(vararg rows: IntArray): Array<IntArray> = arrayOf(*rows)

    private fun row(vararg experts: Int): IntArray = experts

    private fun batch(vararg experts: Int) = Compute(experts)

    private fun Scheduler.predicted(layer: Int, vararg experts: Int): List<Action> {
        val scores = FloatArray(layers[layer].numExperts) { -9f }
        for ((place, expert) in experts.withIndex()) scores[expert] = 9f - place
        return predict(layer, fixedScores(FloatBuffer.wrap(scores)))
    }

    private fun Scheduler.runLayer(layer: Int, vararg experts: Int) {
        beginStep(1)
        val actions = ArrayDeque(route(layer, rows(experts)))
        while (actions.isNotEmpty()) {
            when (val action = actions.removeFirst()) {
                is Load -> actions.addAll(loaded(action.expert, 1))
                is Compute -> actions.addAll(computed(action.experts))
                else -> Unit
            }
        }
        endLayer()
    }

    @Test
    fun `demand loads start up to the limit and in the router's order`() {
        val scheduler = small(4, demandOnly.copy(maxLoads = 1))
        scheduler.beginStep(1)
        assertEquals(listOf<Action>(Load(3, false, 0, 0)), scheduler.route(0, rows(row(3, 1))))
        assertEquals(ExpertState.QUEUED, scheduler.state(1))
        assertEquals(listOf(Load(1, false, 0, page), batch(3)), scheduler.loaded(3, 10))
        // While a batch is being computed, what arrives waits to make the next one.
        assertEquals(emptyList(), scheduler.loaded(1, 10))
        assertEquals(listOf<Action>(batch(1)), scheduler.computed(row(3)))
        assertEquals(emptyList(), scheduler.computed(row(1)))
        assertEquals(emptyList(), scheduler.endLayer())
    }

    @Test
    fun `several rows load in the order of the pack and in waves`() {
        val scheduler = small(2)
        scheduler.beginStep(3)
        assertEquals(
            listOf<Action>(Load(0, false, 0, 0), Load(1, false, 0, page)),
            scheduler.route(0, rows(row(3, 1), row(0, 2), row(1, 0))),
        )
        assertEquals(listOf<Action>(batch(0)), scheduler.loaded(0, 1))
        assertEquals(emptyList(), scheduler.loaded(1, 1))
        assertEquals(listOf(Evict(0), Load(2, false, 0, 0), batch(1)), scheduler.computed(row(0)))
        assertEquals(listOf<Action>(Evict(1), Load(3, false, 0, page)), scheduler.computed(row(1)))
    }

    @Test
    fun `nothing is kept on demand`() {
        val scheduler = small(4, SchedulerConfig.ON_DEMAND)
        scheduler.beginStep(1)
        assertEquals(listOf<Action>(Load(0, false, 0, 0)), scheduler.route(0, rows(row(0, 1))))
        assertEquals(listOf<Action>(Load(1, false, 0, page)), scheduler.loaded(0, 1))
        assertEquals(listOf<Action>(batch(0, 1)), scheduler.loaded(1, 1))
        assertEquals(listOf<Action>(Evict(0), Evict(1)), scheduler.computed(row(0, 1)))
    }

    @Test
    fun `a prediction is queued, promoted and cancelled`() {
        val scheduler = small(8, SchedulerConfig(maxLoads = 1))
        scheduler.beginStep(1)
        assertEquals(listOf<Action>(Load(1, true, 0, 0)), scheduler.predicted(0, 1, 2))
        assertEquals(ExpertState.QUEUED, scheduler.state(2))
        // It replaces the last: what is under way goes on, what is queued and not named again is cancelled.
        assertEquals(listOf<Action>(Cancel(2)), scheduler.predicted(0, 3, 0))
        assertEquals(listOf(Cancel(3), Promote(0), Promote(1)), scheduler.route(0, rows(row(1, 0))))
        assertEquals(Counters(late = 1, misses = 1, lookaheadUsed = 1, lookaheadLoads = 1, lookaheadBytes = page.toLong()), scheduler.counters)
        assertEquals(listOf(Load(0, false, 0, page), batch(1)), scheduler.loaded(1, 1))
    }

    @Test
    fun `demand comes before lookahead`() {
        val scheduler = small(8, SchedulerConfig(maxLoads = 1))
        scheduler.beginStep(1)
        scheduler.route(0, rows(row(0, 1)))
        assertEquals(emptyList(), scheduler.predicted(1, 2, 3))
        assertEquals(listOf(Load(1, false, 0, page), batch(0)), scheduler.loaded(0, 1))
        assertEquals(listOf<Action>(Load(6, true, 0, 2 * page)), scheduler.loaded(1, 1))
    }

    @Test
    fun `a prediction that fails is dropped and a required expert is read again`() {
        val ahead = small(8, SchedulerConfig(maxLoads = 1))
        ahead.beginStep(1)
        ahead.predicted(0, 1)
        assertEquals(Cancel(1), ahead.loadFailed(1)[0])
        val demand = small(8)
        demand.beginStep(1)
        demand.route(0, rows(row(0, 1)))
        assertEquals(listOf<Action>(Load(1, false, 0, page)), demand.loadFailed(1))
        assertEquals(listOf<Action>(batch(1)), demand.loaded(1, 5))
    }

    @Test
    fun `lookahead never takes the place of something worth more`() {
        val scheduler = small(2, SchedulerConfig(maxLoads = 2))
        repeat(12) {
            scheduler.runLayer(0, 0, 1)
            scheduler.runLayer(1, 0, 1)
        }
        assertEquals(listOf(4, 5), (0 until 8).filter { scheduler.state(it) == ExpertState.RESIDENT })
        assertEquals(emptyList(), scheduler.predicted(0, 0, 1)) // used again and again: the experts of layer 1
        scheduler.runLayer(1, 2, 3) // once, which is little against a prediction
        assertEquals(listOf(true, false), scheduler.predicted(0, 0, 1).map { it is Evict })
    }

    @Test
    fun `drafts teach only when accepted`() {
        for ((accepted, evicted) in listOf(row(0, 1) to 4, row(0) to 6)) {
            val scheduler = small(8, numLayers = 3)
            scheduler.beginStep(2, drafts = 1)
            for (layer in 0..1) {
                scheduler.route(layer, rows(row(0, 1), row(2, 3)))
                for (expert in 0..3) scheduler.loaded(4 * layer + expert, 1)
                scheduler.computed(row(4 * layer))
                scheduler.computed(row(4 * layer + 1, 4 * layer + 2, 4 * layer + 3))
                scheduler.endLayer()
            }
            scheduler.accept(accepted)
            // The memory is full: of layer 1, whose turn is farthest, the expert that was not used last goes.
            scheduler.beginStep(1)
            assertEquals(evicted, scheduler.route(2, rows(row(0, 1))).firstNotNullOf { it as? Evict }.expert)
        }
    }

    @Test
    fun `events that cannot happen are refused`() {
        val misuses = listOf<Scheduler.() -> Unit>(
            { beginStep(0) },
            { beginStep(2, 2) },
            { route(0, rows()) },
            { route(0, rows(row(0, 1), row(1, 2))) },
            { route(0, rows(row())) },
            { route(0, rows(row(1, 1))) },
            { route(0, rows(row(1, 4))) },
            { route(0, rows(row(0, 1, 2))) },
            { route(0, rows(row(-1, 2))) },
            { route(2, rows(row(0, 1))) },
            { route(-1, rows(row(0, 1))) },
            { predict(2, IntArray(4)) },
            { predict(0, IntArray(5)) },
            { predict(0, IntArray(0)) },
            { loaded(0, 1) },
            { loaded(99, 1) },
            { loadFailed(0) },
            { computed(row(0)) },
            { computed(row(99)) },
            { endLayer() },
            { accept(row(1)) },
        )
        for ((number, misuse) in misuses.withIndex()) {
            val scheduler = small(4)
            scheduler.beginStep(1)
            assertFailsWith<ScheduleError>("misuse $number") { scheduler.misuse() }
        }
    }

    @Test
    fun `budgets and switches are checked`() {
        assertTrue("at least 8192" in assertFailsWith<BudgetError> { small(1) }.message!!)
        assertTrue("at least 8192" in assertFailsWith<BudgetError> { small(4).pressure(page.toLong()) }.message!!)
        val policy = assertFailsWith<InputError> { small(4, SchedulerConfig(policy = "fifo")) }
        assertEquals("unknown policy 'fifo': expected one of lru, lfu, les", policy.message)
        assertFailsWith<IllegalArgumentException> { small(4, SchedulerConfig(retain = false)) }
        val resident = assertFailsWith<BudgetError> { small(7, SchedulerConfig(resident = true)) }
        assertTrue("all experts in memory need 32768" in resident.message!!)
    }

    @Test
    fun `any budget is planned without overflow`() {
        val scheduler = Scheduler(List(48) { LayerShape(128, 8, 2_514_944) }, Long.MAX_VALUE)
        assertEquals(48L * 128 * 2_514_944, scheduler.committedBytes())
    }

    @Test
    fun `slabs hold whole slots and end at one gibibyte`() {
        val mib = 1L shl 20
        val scheduler = Scheduler(listOf(LayerShape(8, 2, 300 * mib)), 8 * 300 * mib)
        assertEquals(listOf(900 * mib, 900 * mib, 600 * mib), scheduler.slabs().map { it.lengthBytes.toLong() })
        val tooLarge = listOf(LayerShape(8, 1, SLAB_BYTES + page))
        assertTrue("does not fit a slab" in assertFailsWith<BudgetError> { Scheduler(tooLarge, 1L shl 40) }.message!!)
    }
}
