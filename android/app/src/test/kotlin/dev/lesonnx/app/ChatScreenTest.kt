package dev.lesonnx.app

import dev.lesonnx.Bundle
import dev.lesonnx.LoadOptions
import dev.lesonnx.Model
import dev.lesonnx.app.model.ChatModel
import dev.lesonnx.app.model.HostState
import kotlinx.coroutines.runBlocking
import org.junit.Assert.assertEquals
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertTrue
import org.junit.Test
import java.io.File

/** Real tokens of the real library on the screen. */
class ChatScreenTest : ScreenTest() {
    private val prompt = "In the beginning God"

    private fun load(hasChat: Boolean = false, dark: Boolean = false, held: Boolean = false) {
        Fixtures.copySample(File(bundles, "sample"), hasChat)
        start(dark)
        waitFor("The least")
        // Every token reads, so that a gate before the flash holds the model where a test wants it.
        if (held) click("The least")
        click("Load")
        waitUntil("the model") { models.host.state.value is HostState.Ready }
        click("Chat")
    }

    private fun waitForAnswer() = waitUntil("an answer") { !models.chat.state.value.isGenerating }

    @Test
    fun `without a bundle the way to one is shown`() {
        start()
        click("Chat")
        waitFor("No bundle is loaded")
        draw("chat-empty")
        click("Show bundles")
        waitFor("No bundle yet")
    }

    @Test
    fun `a text is completed with the library's tokens`() {
        load()
        waitFor("Begin a text")
        type(prompt)
        click("Send")
        waitForAnswer()
        val expected = runBlocking {
            Model.load(Bundle(File(bundles, "sample").toPath()), Fixtures.platform, LoadOptions()).use { model ->
                model.generate(prompt, ChatModel.DEFAULT_OPTIONS).text()
            }
        }
        assertEquals(listOf(prompt, expected), models.chat.state.value.messages.map { it.text })
        assertTrue(texts().contains(prompt) && texts().contains(expected))
        assertTrue(texts().any { it.matches(Regex("\\d+ tokens, [\\d.]+ tokens/s")) })
        draw("chat")
    }

    @Test
    fun `an answer can be stopped, and the next one begins`() {
        load(held = true)
        app.gate.limit(SOME_READS)
        type(prompt)
        click("Send")
        waitUntil("a first word") { models.chat.state.value.messages.last().text.isNotEmpty() }
        click("Stop")
        app.gate.open()
        waitForAnswer()
        assertEquals("Stopped", models.chat.state.value.messages.last().note)
        assertNotNull(find("Stopped"))
        type(prompt)
        click("Send")
        waitForAnswer()
        assertEquals(4, models.chat.state.value.messages.size)
        assertTrue(models.chat.state.value.messages.last().text.length > 200)
        click("Clear the conversation")
        assertTrue(models.chat.state.value.messages.isEmpty())
    }

    @Test
    fun `a bundle with a chat format keeps the conversation`() {
        load(hasChat = true, dark = true, held = true)
        waitFor("Say something")
        app.gate.limit(SOME_READS)
        type("And God said, Let there be light")
        click("Send")
        waitUntil("a few words") { models.chat.state.value.messages.last().text.length > 60 }
        draw("chat-dark")
        click("Stop")
        app.gate.open()
        waitForAnswer()
        val first = models.chat.state.value.messages
        type("And it was so.")
        click("Send")
        waitForAnswer()
        val all = models.chat.state.value.messages
        assertEquals(first, all.take(2))
        assertEquals(4, all.size)
        assertTrue(all.last().text.isNotEmpty())
    }

    @Test
    fun `a text that does not fit the context is refused in the conversation`() {
        load()
        type("word ".repeat(3000))
        click("Send")
        waitForAnswer()
        val last = models.chat.state.value.messages.last()
        assertTrue(last.isError)
        assertTrue(last.note.orEmpty(), last.note.orEmpty().contains("context of 2048"))
    }

    private companion object {
        /** Enough for a prompt of a few tokens (32 experts of 6 layers) and some fifty after it, 24 experts each. */
        const val SOME_READS = 1500
    }
}
