package dev.lesonnx

import dev.lesonnx.vision.Picture
import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable

/** Who says a message. */
@Serializable
enum class ChatRole {
    @SerialName("system")
    SYSTEM,

    @SerialName("user")
    USER,

    @SerialName("assistant")
    ASSISTANT,
}

/** One message of a conversation. Its [images] stand before its text. */
data class ChatMessage(val role: ChatRole, val content: String, val images: List<Picture> = emptyList())

/**
 * A chat template as plain prefixes and suffixes, as the exporter stores it where that says the same as the template. A
 * conversation is [start], every message between its role's prefix and suffix, then [answer], after which the model speaks.
 * Immutable.
 */
@Serializable
data class ChatFormat(
    val start: String,
    val messages: Map<ChatRole, Frame>,
    val answer: String,
) {
    /** What stands around a message. */
    @Serializable
    data class Frame(val prefix: String, val suffix: String)

    /**
     * The text of a conversation; to be tokenized without special tokens added.
     *
     * @throws InputError for a conversation without messages, or a role that this model's template does not know
     */
    fun render(conversation: List<ChatMessage>): String {
        if (conversation.isEmpty()) throw InputError("the conversation is empty: at least one message is needed")
        val text = StringBuilder(start)
        for (message in conversation) {
            val frame = messages[message.role] ?: throw InputError(
                "role ${name(message.role)} is none of this model's chat format: ${messages.keys.joinToString(transform = ::name)}",
            )
            text.append(frame.prefix).append(message.content).append(frame.suffix)
        }
        return text.append(answer).toString()
    }

    private fun name(role: ChatRole): String = role.name.lowercase()
}
