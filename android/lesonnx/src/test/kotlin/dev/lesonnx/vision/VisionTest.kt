package dev.lesonnx.vision

import dev.lesonnx.Bundle
import dev.lesonnx.LoadOptions
import dev.lesonnx.Prompt
import dev.lesonnx.PromptPicture
import dev.lesonnx.REFERENCE_THREADS
import dev.lesonnx.Reference
import dev.lesonnx.Runner
import dev.lesonnx.SCHEDULES
import dev.lesonnx.Sampler
import dev.lesonnx.SamplingOptions
import dev.lesonnx.TestData
import dev.lesonnx.assertSameBits
import dev.lesonnx.jvm.readPicture
import dev.lesonnx.openRunner
import dev.lesonnx.platform
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.TestFactory
import kotlin.math.abs
import kotlin.test.assertContentEquals
import kotlin.test.assertEquals
import kotlin.test.assertTrue

internal const val PICTURED = "minicpmv4_7-float"
internal const val PICTURED_CHECKPOINT = "checkpoints/minicpmv4_7_moe"

/** The picture of a reference's case as the JDK decodes it. */
internal fun pictureOf(file: String): Picture = readPicture(TestData.data.resolve(PICTURED_CHECKPOINT).resolve(file))

/** Every stage of the prompts with pictures that the checkpoint comes with is Python's, bit for bit. */
internal class VisionTest {
    private val reference = Reference.of(PICTURED)
    private val bundle = Bundle(Reference.bundle(PICTURED))
    private val vision = checkNotNull(bundle.manifest.vision)

    private fun picturesOf(case: Reference.Pictured) = case.files.map(::pictureOf)

    private fun viewsOf(picture: Picture) = Cutting(vision).views(picture.height, picture.width)

    private fun promptOf(case: Reference.Pictured): Prompt {
        val pictures = picturesOf(case)
        val views = pictures.map(::viewsOf)
        val placed = Canvas(vision).place(case.promptIds.toIntArray(), views)
        val prompt = Prompt(case.promptIds.toIntArray(), placed.positions, pictures.indices.map { PromptPicture(pictures[it], views[it], placed.imagePlaces[it]) })
        val features = Eyes(bundle, vision, platform, REFERENCE_THREADS).use { eyes -> prompt.pictures.associateWith { eyes.see(it.picture, it.views) } }
        return prompt.seen(features)
    }

    @Test
    fun `pictures are decoded, cut, prepared and seen as in Python`() {
        Eyes(bundle, vision, platform, REFERENCE_THREADS).use { eyes ->
            for (case in reference.vision) {
                val pictures = picturesOf(case)
                for ((picture, file) in pictures zip case.images) {
                    val ppm = java.nio.file.Files.readAllBytes(TestData.mobile.resolve("reference").resolve(file))
                    assertContentEquals(ppm.copyOfRange(ppm.size - picture.pixels.size, ppm.size), picture.pixels, "${case.name} $file")
                }
                val views = pictures.map(::viewsOf)
                assertEquals(case.views, views.map { own -> own.map { listOf(it.height, it.width, it.rows, it.columns) } })
                val crops = (pictures zip views).flatMap { (picture, own) -> cropsOf(eyes, picture, own) }
                assertContentEquals(case.pixelBits, crops.toIntArray(), "${case.name} pixel values")
                val features = (pictures zip views).flatMap { (picture, own) -> eyes.see(picture, own).map(Float::toRawBits) }
                assertContentEquals(case.featureBits, features.toIntArray(), "${case.name} features")
            }
        }
    }

    /** The packed pixels of a picture as bits, crop after crop. */
    private fun cropsOf(eyes: Eyes, picture: Picture, views: List<View>): List<Int> = eyes.prepare(picture, views).use { prepared ->
        views.flatMapIndexed { place, view ->
            val lines = Picture.CHANNELS * vision.patchSize
            val floats = prepared[place].floats
            val width = floats.capacity() / lines / view.numCrops
            (0 until view.numCrops).flatMap { crop ->
                (0 until lines).flatMap { line -> (0 until width).map { floats[(line * view.numCrops + crop) * width + it].toRawBits() } }
            }
        }
    }

    @Test
    fun `prompts and positions are Python's`() {
        dev.lesonnx.loadFixture(PICTURED).use { model ->
            for (case in reference.vision) {
                val prompts = PicturePrompts(vision, model::encode)
                val prompt = prompts.ofText(case.prompt, picturesOf(case), addSpecialTokens = true)
                assertEquals(case.promptIds, prompt.tokenIds.asList())
                assertEquals(case.positionIds, (0 until 3).map { row -> prompt.tokenIds.indices.map { prompt.position(row, it) } })
                val once = model.encode(case.prompt)
                assertEquals(case.promptIds, prompts.ofIds(once, picturesOf(case)).tokenIds.asList())
            }
        }
    }

    @TestFactory
    fun `tokens and logits are Python's under every schedule and budget`(): List<DynamicTest> = reference.vision.map { case ->
        dynamicTest(case.name) {
            val prompt = promptOf(case)
            for (schedule in SCHEDULES) {
                for ((budget, bytes) in reference.expertBudgetBytes) {
                    if (schedule == "resident" && budget != "all") continue
                    openRunner(bundle, LoadOptions(schedule, "kernel", expertBudgetBytes = bytes)).use { runner ->
                        assertGenerates(runner, prompt, case, "$schedule $budget")
                    }
                }
            }
        }
    }

    private fun assertGenerates(runner: Runner, prompt: Prompt, case: Reference.Pictured, what: String) {
        var logits = runner.prefill(prompt)
        for ((step, expected) in case.tokenIds.withIndex()) {
            assertSameBits(case.logitBits[step], logits, "$what step $step")
            assertEquals(expected, Sampler(SamplingOptions()).sample(logits))
            if (step + 1 < case.tokenIds.size) logits = runner.step(intArrayOf(expected), intArrayOf(0))
        }
    }

    @Test
    fun `chunks of any size across pictures, and both engines, give the same tokens`() {
        for (case in reference.vision) {
            val prompt = promptOf(case)
            for ((chunk, engine) in listOf(1 to "kernel", 7 to "kernel", 24 to "session", 96 to "session")) {
                openRunner(bundle, LoadOptions(engine = engine, prefillChunkTokens = chunk)).use { runner ->
                    var logits = runner.prefill(prompt)
                    for ((step, expected) in case.tokenIds.withIndex()) {
                        val bits = case.logitBits[step]
                        assertTrue(bits.indices.all { abs(Float.fromBits(bits[it]) - logits[it]) < 1e-3f }, "${case.name} in chunks of $chunk, step $step")
                        assertEquals(expected, Sampler(SamplingOptions()).sample(logits))
                        if (step + 1 < case.tokenIds.size) logits = runner.step(intArrayOf(expected), intArrayOf(0))
                    }
                }
            }
        }
    }

    @Test
    fun `steps that are taken back leave the positions`() {
        val case = reference.vision.last()
        openRunner(bundle, LoadOptions(engine = "kernel")).use { runner ->
            runner.prefill(promptOf(case))
            val wrong = intArrayOf(case.tokenIds[0], 5, 6)
            val drafted = runner.draftStep(wrong).first().copyOf()
            runner.keep(1)
            assertTrue(case.logitBits[1].indices.all { abs(Float.fromBits(case.logitBits[1][it]) - drafted[it]) < 1e-3f })
            for (step in 1 until case.tokenIds.size - 1) {
                val logits = runner.step(intArrayOf(case.tokenIds[step]), intArrayOf(0))
                assertTrue(case.logitBits[step + 1].indices.all { abs(Float.fromBits(case.logitBits[step + 1][it]) - logits[it]) < 1e-3f }, "step $step")
            }
        }
    }

    @Test
    fun `a prompt begins with what was run as far as its pictures are the same`() {
        val case = reference.vision.first { it.name == "case2" }
        val prompt = promptOf(case)
        openRunner(bundle, LoadOptions(engine = "kernel")).use { runner ->
            runner.prefill(prompt)
            val longer = Prompt(prompt.tokenIds + intArrayOf(5, 6), longerPositions(prompt), prompt.pictures)
            assertEquals(prompt.size, runner.commonTokens(longer))
            // The first picture has recurrent layers' states behind it that only the start and the end of the step reach.
            val other = prompt.pictures.map { Picture(it.picture.height, it.picture.width, it.picture.pixels.copyOf().also { pixels -> pixels[0]++ }) }
            val changed = prompt.pictures.mapIndexed { place, own -> if (place == 1) PromptPicture(other[1], own.views, own.places) else own }
            assertEquals(runner.states.reachable(changed[1].places.first()), runner.commonTokens(Prompt(longer.tokenIds, longerPositions(prompt), changed)))
            assertEquals(0, runner.commonTokens(Prompt(longer.tokenIds)), "the positions are others without pictures")
        }
    }

    private fun longerPositions(prompt: Prompt): Array<IntArray> {
        val next = (0 until 3).maxOf { row -> prompt.tokenIds.indices.maxOf { prompt.position(row, it) } } + 1
        return Array(3) { row -> IntArray(prompt.size + 2) { if (it < prompt.size) prompt.position(row, it) else next + it - prompt.size } }
    }
}
