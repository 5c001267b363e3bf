package dev.lesonnx

import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import org.junit.jupiter.api.Test

internal class ChatFormatTest {
    private val format = ChatFormat(
        start = "<s>",
        messages = mapOf(
            ChatRole.USER to ChatFormat.Frame("<user>", "</user>\n"),
            ChatRole.ASSISTANT to ChatFormat.Frame("<model>", "</model>\n"),
        ),
        answer = "<model>",
    )

    @Test
    fun `a conversation is its messages between their frames`() {
        val conversation = listOf(
            ChatMessage(ChatRole.USER, "Hello"),
            ChatMessage(ChatRole.ASSISTANT, "Hi"),
            ChatMessage(ChatRole.USER, ""),
        )
        assertEquals("<s><user>Hello</user>\n<model>Hi</model>\n<user></user>\n<model>", format.render(conversation))
    }

    @Test
    fun `what the format cannot say is refused`() {
        val error = assertFailsWith<InputError> { format.render(listOf(ChatMessage(ChatRole.SYSTEM, "Be brief"))) }
        assertEquals("role system is none of this model's chat format: user, assistant", error.message)
        assertFailsWith<InputError> { format.render(emptyList()) }
    }
}
