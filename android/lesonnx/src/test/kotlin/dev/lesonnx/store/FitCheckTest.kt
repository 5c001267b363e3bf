package dev.lesonnx.store

import dev.lesonnx.Bundle
import dev.lesonnx.GROWTH_TOKENS
import dev.lesonnx.LayerStates
import dev.lesonnx.REFERENCE_THREADS
import dev.lesonnx.Reference
import dev.lesonnx.TestData
import dev.lesonnx.platform
import dev.lesonnx.speculative.DSparkDrafter
import org.junit.jupiter.api.Test
import java.nio.file.Files
import java.nio.file.Path
import kotlin.test.assertEquals
import kotlin.test.assertTrue

/** Needs X, device has Y. */
class FitCheckTest {
    private val origin: Path = TestData.mobile.resolve("bundles/sample-int4")
    private val bundle = Bundle(origin)
    private val files = filesOf(origin)
    private val needs = needsOf(bundle.manifest, files)

    private fun check(available: Long, storage: Long = 1L shl 40, isStored: Boolean = true) =
        FitCheck.of(bundle.manifest, files, Device(available, available, processBytes = 0, reserveBytes = 0, storageBytes = storage), isStored)

    /** The memory that gives a process [bytes]. */
    private fun memoryFor(bytes: Long) = (bytes / FitCheck.MEMORY_SHARE).toLong() + 1

    @Test
    fun `needs are what the bundle and its files say`() {
        assertEquals(bundle.leastBudgetBytes, needs.leastBudget)
        assertEquals(bundle.tokenDemandBytes, needs.tokenDemand)
        assertEquals(bundle.expertBytes, needs.experts)
        assertEquals(Files.list(origin.resolve("dense")).use { all -> all.mapToLong(Files::size).sum() }, needs.dense)
        // 6 layers, keys and values, 2 heads of 32 float32.
        assertEquals(6 * 2 * 2 * 32 * 4L, needs.stateOfToken)
        assertEquals(512 * needs.stateOfToken, needs.firstStates)
        assertEquals(files.values.sum(), needs.storage)
    }

    @Test
    fun `states count as the runner counts them`() {
        for (name in Reference.BUNDLES) {
            val directory = Reference.bundle(name)
            val bundle = Bundle(directory)
            val manifest = bundle.manifest
            val drafterOfToken = if (manifest.drafter == null) 0 else drafterOfToken(bundle)
            LayerStates(manifest, platform).use { states ->
                val needs = needsOf(manifest, filesOf(directory))
                val first = minOf(GROWTH_TOKENS, states.maxTokens)
                assertEquals(states.bytesAt(first) + first * drafterOfToken, needs.firstStates, name)
                assertEquals(states.bytesAt(first + 1) - states.bytesAt(first) + drafterOfToken, needs.stateOfToken, name)
            }
        }
        // 6 layers, keys and values, 2 heads of 32 bytes.
        val int8 = Reference.bundle("sample-int4-kv8")
        assertEquals(6 * 2 * 2 * 32L, needsOf(Bundle(int8).manifest, filesOf(int8)).stateOfToken)
    }

    private fun drafterOfToken(bundle: Bundle): Long = DSparkDrafter(bundle, platform, REFERENCE_THREADS).use { drafter ->
        (drafter.bytesAt(2 * GROWTH_TOKENS) - drafter.bytesAt(GROWTH_TOKENS)) / GROWTH_TOKENS
    }

    @Test
    fun `the verdict changes where a budget does`() {
        assertEquals(Fit.TOO_LITTLE_MEMORY, check(memoryFor(needs.least) - 100).fit)
        assertEquals(Fit.TIGHT, check(memoryFor(needs.least)).fit)
        assertEquals(Fit.CACHED, check(memoryFor(needs.fixed + needs.tokenDemand)).fit)
        assertEquals(Fit.WHOLE, check(memoryFor(needs.fixed + needs.experts)).fit)
        assertEquals(needs.experts, check(1L shl 40).expertBytes)
        assertTrue(check(memoryFor(needs.fixed + needs.tokenDemand)).expertBytes in needs.tokenDemand..needs.tokenDemand + 2)
    }

    @Test
    fun `storage counts for a bundle that is not here yet`() {
        assertEquals(Fit.TOO_LITTLE_STORAGE, check(1L shl 40, storage = needs.storage - 1, isStored = false).fit)
        assertEquals(Fit.WHOLE, check(1L shl 40, storage = needs.storage, isStored = false).fit)
        assertEquals(Fit.WHOLE, check(1L shl 40, storage = 0).fit)
    }

    @Test
    fun `sizes are written with three digits`() {
        assertEquals(listOf("999 B", "1.00 kB", "9.99 kB", "10.0 kB", "100 kB", "1.00 MB", "15.4 GB", "2.00 TB"),
            listOf(999L, 1000, 9_990, 9_999, 99_960, 999_600, 15_432_000_000, 2_000_000_000_000).map(::formatBytes))
    }
}
