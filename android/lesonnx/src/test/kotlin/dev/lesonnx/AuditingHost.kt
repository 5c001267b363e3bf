package dev.lesonnx

import kotlin.test.assertEquals
import kotlin.test.assertFalse
import kotlin.test.assertTrue

/**
 * A host without threads for one scheduler: carries its actions out in any order, keeps its own account of memory and checks
 * what must always hold. [choose] picks one of n things that may happen next; [fails] says whether a read fails.
 */
internal class AuditingHost(
    val scheduler: Scheduler,
    var budgetBytes: Long,
    private val choose: (Int) -> Int,
    private val fails: (Int) -> Boolean = { false },
    private val readUs: (Int) -> Long = { 1000 },
) {
    val cost: List<Long> = scheduler.layers.flatMap { shape ->
        List(shape.numExperts) { shape.costBytes } + List(if (shape.sharedCostBytes > 0) 1 else 0) { shape.sharedCostBytes }
    }
    val loading = ArrayList<Int>()
    val resident = HashSet<Int>()
    val where = HashMap<Int, Pair<Int, Int>>()
    private val required = HashSet<Int>()
    private val batches = ArrayDeque<IntArray>()
    private val computed = ArrayList<Int>()
    private val speculative = HashSet<Int>()

    /** Every action so far. */
    val log = ArrayList<Action>()

    fun send(event: Scheduler.() -> List<Action>) {
        val actions = scheduler.event()
        log.addAll(actions)
        for (action in actions) {
            when (action) {
                is Action.Load -> load(action)
                is Action.Evict -> {
                    assertTrue(resident.remove(action.expert), "evicted ${action.expert}, which is not resident")
                    assertFalse(action.expert in required, "evicted ${action.expert}, which is required")
                    where.remove(action.expert)
                }
                is Action.Compute -> compute(action.experts)
                is Action.Promote -> speculative.remove(action.expert)
                is Action.Cancel -> assertFalse(action.expert in required, "cancelled ${action.expert}, which is required")
            }
        }
        checkMemory()
    }

    private fun load(load: Action.Load) {
        val expert = load.expert
        assertFalse(expert in loading, "$expert is read twice at once")
        assertFalse(expert in resident, "$expert is read though resident")
        assertTrue(load.lookahead || expert in required || scheduler.config.resident, "$expert is not required")
        val place = load.slab to load.offsetBytes
        where[expert]?.let { assertEquals(it, place, "$expert moved between two tries") }
        where[expert] = place
        loading.add(expert)
        if (load.lookahead) speculative.add(expert)
        assertTrue(loading.size <= scheduler.config.maxLoads, "too many loads at once")
        val ahead = loading.count { it in speculative }
        assertTrue(ahead <= scheduler.config.lookaheadLoads, "too many lookahead loads at once")
    }

    private fun compute(experts: IntArray) {
        assertTrue(experts.isNotEmpty(), "an empty batch")
        for (expert in experts) {
            assertTrue(expert in resident, "compute of $expert, which is not resident")
            assertTrue(expert in required, "compute of $expert, which is not required")
            assertFalse(batches.any { expert in it }, "$expert given out twice")
        }
        batches.add(experts)
    }

    fun checkMemory() {
        val held = where.keys.sumOf { cost[it] }
        assertTrue(held <= budgetBytes, "$held bytes held, budget $budgetBytes")
        val slabs = scheduler.slabs()
        val spans = where.entries.sortedWith(compareBy({ it.value.first }, { it.value.second }))
        for ((expert, place) in spans) {
            val (slab, start) = place
            assertTrue(start >= 0 && start % PAGE_BYTES == 0, "a place off the page grid")
            assertTrue(start + cost[expert] <= slabs[slab].lengthBytes, "a place beyond its slab")
            assertTrue(slabs[slab].lengthBytes <= scheduler.config.slabBytes, "a slab that is too long")
        }
        for ((one, next) in spans.zipWithNext()) {
            val ends = one.value.second + cost[one.key]
            assertTrue(one.value.first != next.value.first || ends <= next.value.second, "two experts overlap")
        }
    }

    /** Let one pending thing happen: a read ends or a batch is computed. False if nothing is pending. */
    fun happen(): Boolean {
        val pending = loading.size + if (batches.isEmpty()) 0 else 1
        if (pending == 0) return false
        val pick = choose(pending)
        if (pick < loading.size) endRead(loading[pick]) else endCompute()
        return true
    }

    /** Let everything pending happen. */
    fun drain() {
        var more = true
        while (more) more = happen()
    }

    private fun endRead(expert: Int) {
        loading.remove(expert)
        if (fails(expert)) {
            if (speculative.remove(expert)) where.remove(expert)
            send { loadFailed(expert) }
        } else {
            speculative.remove(expert)
            resident.add(expert)
            send { loaded(expert, readUs(expert)) }
        }
    }

    private fun endCompute() {
        val batch = batches.removeFirst()
        for (expert in batch) {
            required.remove(expert)
            computed.add(expert)
        }
        send { computed(batch) }
    }

    /** A layer from `route` to `endLayer`; [beforeEach] may send whatever may come at any moment. */
    fun runLayer(layer: Int, rows: Array<IntArray>, beforeEach: () -> Unit = {}) {
        val shape = scheduler.layers[layer]
        val first = scheduler.first(layer)
        for (row in rows) for (expertIdx in row) required.add(first + expertIdx)
        if (shape.sharedCostBytes > 0) required.add(first + shape.numExperts)
        val expected = required.sorted()
        computed.clear()
        send { route(layer, rows) }
        while (required.isNotEmpty()) {
            beforeEach()
            assertTrue(happen(), "nothing is pending, but $required are required")
        }
        assertEquals(expected, computed.sorted(), "not every required expert was computed exactly once")
        send { endLayer() }
    }
}
