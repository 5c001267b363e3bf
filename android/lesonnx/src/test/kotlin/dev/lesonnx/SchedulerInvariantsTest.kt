package dev.lesonnx

import java.nio.FloatBuffer
import kotlin.random.Random
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertTrue
import org.junit.jupiter.api.Test

/** What must hold for any model, budget, route, prediction, failure and order of loads; each seed is one run. */
internal class SchedulerInvariantsTest {
    @Test
    fun `invariants hold for any run`() = forSeeds(600) { seed ->
        val random = Random(seed)
        val layers = model(random)
        val least = leastBytes(layers)
        val total = totalBytes(layers)
        val budget = random.nextLong(least, total + 8 * PAGE_BYTES + 1)
        var config = config(random)
        if (random.nextBoolean()) {
            config = config.copy(retain = false, lookahead = false)
        } else if (budget >= total && random.nextBoolean()) {
            config = config.copy(resident = true)
        }
        val failing = HashSet<Int>()
        val scheduler = Scheduler(layers, budget, config)
        val host = AuditingHost(
            scheduler,
            budget,
            random::nextInt,
            { expert -> if (failing.remove(expert) || random.nextDouble() > 0.1) false else failing.add(expert) },
            { random.nextLong(1, 9000) },
        )
        repeat(random.nextInt(1, 6)) { step(host, random) }
        host.drain()
        host.checkMemory()
        val counters = scheduler.counters
        assertTrue(counters.lookaheadUsed + counters.lookaheadWasted <= counters.lookaheadLoads)
    }

    private fun step(host: AuditingHost, random: Random) {
        val scheduler = host.scheduler
        val rows = intArrayOf(1, 1, 2, 3, 12).random(random)
        val drafts = random.nextInt(rows)
        host.send { beginStep(rows, drafts) }
        for (layer in scheduler.layers.indices) {
            val present = if (random.nextDouble() < 0.9) rows else random.nextInt(1, rows + 1)
            noise(host, random)
            host.runLayer(layer, rows(scheduler.layers[layer], present, random)) { noise(host, random) }
            if (!scheduler.config.retain) assertEquals(emptySet(), host.resident)
        }
        if (drafts > 0) host.send { accept(IntArray(rows - drafts + random.nextInt(drafts + 1)) { it }) }
        if (!scheduler.config.resident && random.nextBoolean()) squeeze(host, random)
    }

    /** What may come at any moment: a prediction for another layer, or nothing. */
    private fun noise(host: AuditingHost, random: Random) {
        val layer = random.nextInt(host.scheduler.layers.size)
        if (random.nextDouble() < 0.4 && layer != host.scheduler.openLayer) {
            val scores = FloatArray(random.nextInt(1, 4) * host.scheduler.layers[layer].numExperts) { random.nextFloat() * 4 - 2 }
            host.send { predict(layer, fixedScores(FloatBuffer.wrap(scores))) }
        }
    }

    private fun squeeze(host: AuditingHost, random: Random) {
        val scheduler = host.scheduler
        val new = random.nextLong(leastBytes(scheduler.layers), totalBytes(scheduler.layers) + 1)
        // What is loading cannot be taken back; all else must fit at once, and everything when the reads are done.
        val loading = host.loading.sumOf { host.cost[it] }
        val before = scheduler.slabs()
        host.budgetBytes = maxOf(host.budgetBytes, new)
        host.send { pressure(new) }
        host.budgetBytes = new + loading
        host.checkMemory()
        host.drain()
        host.budgetBytes = new
        host.checkMemory()
        assertTrue(scheduler.committedBytes() <= new)
        assertTrue(scheduler.slabs().sumOf { it.lengthBytes.toLong() } <= new)
        assertEquals(before.size, scheduler.slabs().size)
    }

    @Test
    fun `pressure amid a layer is met when it ends`() = forSeeds(200) { seed ->
        val random = Random(seed)
        val layers = model(random)
        val total = totalBytes(layers)
        val host = AuditingHost(Scheduler(layers, total, config(random)), total, random::nextInt)
        repeat(3) {
            host.send { beginStep(4) }
            for (layer in layers.indices) {
                val new = random.nextLong(leastBytes(layers), total + 1)
                host.runLayer(layer, rows(layers[layer], 4, random)) {
                    if (random.nextBoolean()) host.send { pressure(new) }
                }
                host.send { pressure(new) }
                host.drain()
                host.budgetBytes = new
                host.checkMemory()
                assertTrue(host.scheduler.committedBytes() <= new)
                host.budgetBytes = total
            }
        }
    }

    @Test
    fun `a read that fails twice stops the run`() = forSeeds(60) { seed ->
        val random = Random(seed)
        val layers = model(random)
        val total = totalBytes(layers)
        val host = AuditingHost(Scheduler(layers, total, config(random)), total, random::nextInt, { true })
        host.send { beginStep(1) }
        val error = assertFailsWith<LoadError> {
            host.runLayer(0, arrayOf(IntArray(layers[0].numExpertsPerTok) { it }))
        }
        assertTrue("could not be read, twice" in error.message!!)
    }

    @Test
    fun `the same events give the same actions`() = forSeeds(60) { seed ->
        val logs = List(2) {
            val random = Random(seed)
            val layers = model(random)
            val budget = maxOf(leastBytes(layers), totalBytes(layers) / 2)
            val host = AuditingHost(Scheduler(layers, budget, config(random)), budget, random::nextInt)
            repeat(3) { step(host, random) }
            host.log
        }
        assertEquals(logs[0], logs[1])
    }

    private fun forSeeds(count: Int, run: (Int) -> Unit) {
        for (seed in 0 until count) {
            try {
                run(seed)
            } catch (error: Throwable) {
                throw AssertionError("seed $seed: ${error.message}", error)
            }
        }
    }

    private fun model(random: Random): List<LayerShape> {
        val sizes = List(random.nextInt(1, 4)) { random.nextInt(1, 7) }
        val shared = intArrayOf(0, 0, 1, 3).random(random)
        val perTok = random.nextInt(1, 5)
        return List(random.nextInt(1, 6)) {
            LayerShape(
                random.nextInt(perTok, 11),
                if (random.nextBoolean()) perTok else random.nextInt(1, perTok + 1),
                sizes.random(random).toLong() * PAGE_BYTES,
                shared.toLong() * PAGE_BYTES,
            )
        }
    }

    private fun config(random: Random) = SchedulerConfig(
        policy = POLICIES.random(random),
        maxLoads = random.nextInt(1, 6),
        computeFirst = random.nextBoolean(),
        lookahead = random.nextBoolean(),
        lookaheadLoads = random.nextInt(1, 5),
        lookaheadBytes = listOf(0L, 4L * PAGE_BYTES, 40L * PAGE_BYTES).random(random),
        lookaheadOdds = intArrayOf(0, ONE / 3, ONE).random(random),
        slabBytes = listOf(6L * PAGE_BYTES, 25L * PAGE_BYTES, SLAB_BYTES).random(random),
    )

    private fun rows(shape: LayerShape, count: Int, random: Random) = Array(count) {
        (0 until shape.numExperts).shuffled(random).take(shape.numExpertsPerTok).toIntArray()
    }

    private fun leastBytes(layers: List<LayerShape>) =
        layers.maxOf { it.numExpertsPerTok * it.costBytes + it.sharedCostBytes }

    private fun totalBytes(layers: List<LayerShape>) = layers.sumOf { it.numExperts * it.costBytes + it.sharedCostBytes }
}
