package dev.lesonnx.vision

import dev.lesonnx.BudgetError
import dev.lesonnx.Bundle
import dev.lesonnx.ChatMessage
import dev.lesonnx.ChatRole
import dev.lesonnx.CountingPlatform
import dev.lesonnx.GenerationOptions
import dev.lesonnx.InputError
import dev.lesonnx.LoadOptions
import dev.lesonnx.PromptPicture
import dev.lesonnx.REFERENCE_THREADS
import dev.lesonnx.Reference
import dev.lesonnx.loadFixture
import dev.lesonnx.openRunner
import kotlinx.coroutines.runBlocking
import org.junit.jupiter.api.Test
import kotlin.test.assertContentEquals
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertNotNull
import kotlin.test.assertNull
import kotlin.test.assertSame
import kotlin.test.assertTrue

/** Pictures by what an app calls: texts and conversations with them, and the memory that they take. */
internal class PicturedModelTest {
    private val reference = Reference.of(PICTURED)
    private val bundle = Bundle(Reference.bundle(PICTURED))
    private val vision = checkNotNull(bundle.manifest.vision)
    private val greedy = GenerationOptions(maxNewTokens = reference.vision.first().tokenIds.size, ignoreEos = true)

    private fun said(work: () -> Unit): String = assertFailsWith<InputError>(block = work).message!!.also { assertTrue('\n' !in it, it) }

    @Test
    fun `texts and ids with pictures give Python's tokens, by every drafter`() {
        for (options in listOf(LoadOptions(), LoadOptions(draft = "ngram"), LoadOptions(draft = "draft-model", draftModel = bundle.directory))) {
            loadFixture(PICTURED, options.copy(engine = "kernel")).use { model ->
                for (case in reference.vision) {
                    val pictures = case.files.map(::pictureOf)
                    val generation = model.generate(case.prompt, greedy, pictures)
                    runBlocking { generation.text() }
                    val report = generation.report
                    assertEquals(case.tokenIds, report.tokenIds, "${case.name} by ${options.draft}")
                    assertEquals(Triple(pictures.size, case.featuresShape[0], case.promptIds.size), Triple(report.pictures, report.imageTokens, report.promptTokens))
                    val byIds = model.generate(model.encode(case.prompt), greedy, pictures)
                    runBlocking { byIds.text() }
                    assertEquals(case.tokenIds, byIds.report.tokenIds)
                    assertEquals(0.0, byIds.report.visionMs, "they are known by now")
                }
            }
        }
    }

    @Test
    fun `a conversation keeps its pictures, and another picture is another conversation`() {
        loadFixture(PICTURED, LoadOptions(engine = "kernel")).use { model ->
            val picture = pictureOf("images/small.png")
            val asked = ChatMessage(ChatRole.USER, "What is shown here?", listOf(picture))
            val first = model.chat(listOf(asked), greedy)
            runBlocking { first.text() }
            // That conversation is case0, whose prompt the chat template made.
            assertEquals(reference.vision.first().tokenIds, first.report.tokenIds)
            assertTrue(first.report.visionMs > 0)
            val again = model.chat(listOf(asked), greedy)
            runBlocking { again.text() }
            assertEquals(first.report.tokenIds, again.report.tokenIds)
            val other = Picture(picture.height, picture.width, ByteArray(picture.pixels.size) { 9 })
            val changed = model.chat(listOf(asked.copy(images = listOf(other))), greedy)
            runBlocking { changed.text() }
            assertEquals(0, changed.report.reusedTokens)
            assertTrue(changed.report.tokenIds != first.report.tokenIds && changed.report.visionMs > 0)
            val goesOn = listOf(asked, ChatMessage(ChatRole.ASSISTANT, "A tree."), ChatMessage(ChatRole.USER, "And here?", listOf(other)))
            val second = model.chat(goesOn, greedy)
            runBlocking { second.text() }
            assertEquals(2 to 0.0, second.report.pictures to second.report.visionMs)
        }
    }

    @Test
    fun `what cannot be served is one line, and the model stays usable`() {
        loadFixture(PICTURED).use { model ->
            assertNull(model.whyNoPictures)
            val picture = pictureOf("images/small.png")
            val placeholder = vision.texts.placeholder
            assertTrue("2 placeholders '$placeholder' for 1 picture," in said { model.generate("$placeholder and $placeholder", greedy, listOf(picture)) })
            assertTrue("1 placeholder '$placeholder' for 0 pictures," in said { model.generate("A $placeholder", greedy) })
            assertTrue("hold the image token ${vision.tokens.image} 0 times, expected once a picture: 1" in said { model.generate(intArrayOf(5, 6), greedy, listOf(picture)) })
            assertTrue("too narrow" in said { model.generate("x", greedy, listOf(Picture(1, 4000, ByteArray(12000)))) })
            assertTrue("expected 3 a pixel" in said { Picture(2, 2, ByteArray(5)) })
            val inFront = model.generate("What is shown here?", greedy, listOf(picture))
            runBlocking { inFront.text() }
            assertEquals(1, inFront.report.pictures)
        }
        loadFixture("sample-int4").use { model ->
            assertNotNull(model.whyNoPictures)
            assertTrue("this bundle has no eyes: it takes no pictures" in said { model.generate("x", greedy, listOf(pictureOf("images/small.png"))) })
            assertTrue("no eyes" in said { model.generate(intArrayOf(5), greedy, listOf(pictureOf("images/small.png"))) })
        }
    }

    private fun promptPicture(picture: Picture) = PromptPicture(picture, Cutting(vision).views(picture.height, picture.width), IntArray(0))

    @Test
    fun `reading that breaks off among the crops frees what it took, and keeps what was read`() {
        val platform = CountingPlatform()
        val case = reference.vision.first { it.name == "case2" }
        val pictures = case.files.map { promptPicture(pictureOf(it)) }
        val sight = Sight(bundle, vision, platform, REFERENCE_THREADS) { _, block -> block() }
        var crops = 0
        assertFailsWith<IllegalStateException> { sight.see(pictures) { check(++crops < 5) { "enough" } } }
        assertEquals(0, platform.liveBytes.get())
        crops = 0
        val features = sight.see(pictures) { crops++ }
        assertEquals(pictures.sumOf { own -> own.views.sumOf { it.numCrops } } - pictures[0].views.sumOf { it.numCrops }, crops, "the first was read")
        assertContentEquals(case.featureBits, pictures.flatMap { features.getValue(it).map(Float::toRawBits) }.toIntArray())
        assertSame(features.getValue(pictures[1]), sight.see(pictures.drop(1)) { error("it is known") }.getValue(pictures[1]))
        assertEquals(0, platform.liveBytes.get())
    }

    @Test
    fun `what is kept of pictures is bounded`() {
        val sight = Sight(bundle, vision, CountingPlatform(), REFERENCE_THREADS, mostKept = 8 * bundle.manifest.model.hiddenSize) { _, block -> block() }
        val pictures = List(3) { promptPicture(Picture(100, 100, ByteArray(30000) { _ -> it.toByte() })) }
        assertEquals(4, pictures[0].views.sumOf { it.numTokens(vision) })
        var crops = 0
        for (place in listOf(0, 1, 0, 2, 0, 1)) sight.see(listOf(pictures[place])) { crops++ }
        assertEquals(4, crops, "two fit, and the one that was wanted longest ago gives way")
    }

    @Test
    fun `experts give way while pictures are read, and get it back`() {
        val budget = 64L shl 30
        openRunner(bundle, LoadOptions(engine = "kernel")).use { runner ->
            runner.boundMemory(budget)
            assertEquals(bundle.expertBytes, runner.loader.expertBudgetBytes)
            val refused = assertFailsWith<BudgetError> { runner.borrow(budget) { error("there is no room") } }.message!!
            val (fixed, caches) = checkNotNull(Regex("may take (\\d+), attention caches of \\d+ tokens (\\d+), reading a picture $budget,").find(refused)) { refused }
                .destructured.toList().map(String::toLong)
            assertEquals(bundle.expertBytes, runner.loader.expertBudgetBytes, "what was refused has changed nothing")
            val wanted = bundle.leastBudgetBytes + (bundle.expertBytes - bundle.leastBudgetBytes) / 2
            val lent = budget - fixed - caches - (wanted * runner.loader.engine.memoryPerByte).toLong()
            val within = runner.borrow(lent) { runner.loader.expertBudgetBytes }
            assertTrue(within in wanted - 4096..wanted + 4096, "$within, expected about $wanted")
            assertEquals(bundle.expertBytes, runner.loader.expertBudgetBytes)
        }
    }

    @Test
    fun `a budget that pictures cannot fit in is one line, and text goes on`() {
        val picture = pictureOf("images/wide.png")
        loadFixture(PICTURED).use { model ->
            assertTrue(Eyes.readingBytes(bundle, vision, picture, Cutting(vision).views(picture.height, picture.width)) > 27L * picture.height * picture.width)
            assertNull(model.options.memoryBudgetBytes)
        }
        val heap = dev.lesonnx.platform.heapGrowthBytes()
        // More than reading takes of the process, less than a picture of 100 megapixels would.
        loadFixture(PICTURED, LoadOptions(memoryBudgetBytes = dev.lesonnx.Memory.currentBytes() + heap + (600L shl 20))).use { model ->
            val large = Picture(10000, 10000, ByteArray(300_000_000))
            val error = assertFailsWith<BudgetError> { runBlocking { model.generate("x", greedy, listOf(large)).text() } }
            assertTrue("reading a picture" in error.message!! && '\n' !in error.message!!, error.message)
            val generation = model.generate("What is shown here?", greedy, listOf(picture))
            runBlocking { generation.text() }
            assertEquals(greedy.maxNewTokens, generation.report.tokenIds.size)
        }
    }
}
