package dev.lesonnx.app.model

import dev.lesonnx.ChatMessage
import dev.lesonnx.ChatRole
import dev.lesonnx.GenerationOptions
import dev.lesonnx.GenerationReport
import dev.lesonnx.LesonnxError
import dev.lesonnx.Memory
import dev.lesonnx.Model
import dev.lesonnx.SamplingOptions
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Job
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.update
import kotlinx.coroutines.launch
import java.util.Locale

/** Who wrote a message. */
enum class Author { USER, MODEL }

/** A message on the screen. [note] is a line under it: how fast it came, or that it was stopped. */
data class Message(
    val author: Author,
    val text: String,
    val note: String? = null,
    val isGrowing: Boolean = false,
    val isError: Boolean = false,
)

/** What the chat screen shows beside the host's state. */
data class ChatState(val messages: List<Message> = emptyList(), val isGenerating: Boolean = false)

/**
 * A conversation with the loaded model: chat where its bundle says how, else a completion of each text by itself.
 *
 * Call it from one thread; it computes on the host's.
 */
class ChatModel(
    private val host: ModelHost,
    private val telemetry: TelemetryModel,
    private val scope: CoroutineScope,
    private val options: GenerationOptions = DEFAULT_OPTIONS,
) {
    private val mutableState = MutableStateFlow(ChatState())
    private var generating: Job? = null

    val state: StateFlow<ChatState> = mutableState

    /** Sends a text and lets the answer grow in [state]. Does nothing while another answer grows. */
    fun send(text: String) {
        if (text.isBlank() || mutableState.value.isGenerating) return
        val history = mutableState.value.messages
        val begun = history + Message(Author.USER, text) + Message(Author.MODEL, "", isGrowing = true)
        mutableState.value = ChatState(begun, isGenerating = true)
        generating = scope.launch {
            try {
                val answered = host.use { model -> answer(model, history, text) }
                if (answered == null) end { it.copy(text = "No bundle is loaded.", isError = true) }
            } catch (error: LesonnxError) {
                end { it.copy(text = it.text, note = error.message, isError = true) }
            } finally {
                // Where it was stopped, nothing has ended it yet.
                end { if (it.isGrowing) it.copy(note = "Stopped") else it }
            }
        }
    }

    /** Stops the answer that grows; what has come stays. */
    fun stop() {
        generating?.cancel()
    }

    /** Begins anew. */
    fun clear() {
        if (!mutableState.value.isGenerating) mutableState.value = ChatState()
    }

    private suspend fun answer(model: Model, history: List<Message>, text: String) {
        val generation = if (model.hasChat) model.chat(conversation(history, text), options) else model.generate(text, options)
        var before = model.telemetry
        var began = System.nanoTime()
        var count = 0
        generation.tokens.collect { token ->
            val now = System.nanoTime()
            val after = model.telemetry
            if (token.id != null) count += 1
            // The first token is the prefill's, which is no token's speed.
            if (token.id != null && count > 1) {
                telemetry.token((now - began) / 1e6, before, after, Memory.currentBytes(), model.expertBudgetBytes, generation.report.drafts)
            }
            before = after
            began = now
            mutableState.update { it.withLast { last -> last.copy(text = last.text + token.text) } }
        }
        end { it.copy(note = noteOf(generation.report), isGrowing = false) }
    }

    private fun conversation(history: List<Message>, text: String): List<ChatMessage> =
        (history.filter { it.text.isNotEmpty() && !it.isError } + Message(Author.USER, text)).map {
            ChatMessage(if (it.author == Author.USER) ChatRole.USER else ChatRole.ASSISTANT, it.text)
        }

    private fun end(change: (Message) -> Message) = mutableState.update { state ->
        state.withLast { change(it).copy(isGrowing = false) }.copy(isGenerating = false)
    }

    private fun ChatState.withLast(change: (Message) -> Message): ChatState =
        if (messages.isEmpty()) this else copy(messages = messages.dropLast(1) + change(messages.last()))

    private fun noteOf(report: GenerationReport): String =
        "%d tokens, %.1f tokens/s".format(Locale.ROOT, report.tokenIds.size, report.tokensPerS)

    companion object {
        val DEFAULT_OPTIONS = GenerationOptions(sampling = SamplingOptions(temperature = 0.7, topP = 0.9, seed = 1u))
    }
}
