package dev.lesonnx.app.model

import dev.lesonnx.ChatMessage
import dev.lesonnx.ChatRole
import dev.lesonnx.GenerationOptions
import dev.lesonnx.GenerationReport
import dev.lesonnx.LesonnxError
import dev.lesonnx.Memory
import dev.lesonnx.Model
import dev.lesonnx.SamplingOptions
import dev.lesonnx.vision.Picture
import kotlinx.coroutines.CoroutineDispatcher
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.update
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext
import java.util.Locale

/** Who wrote a message. */
enum class Author { USER, MODEL }

/** A message on the screen, with the pictures that it shows. [note] is a line under it: how fast it came, or that it was stopped. */
data class Message(
    val author: Author,
    val text: String,
    val note: String? = null,
    val isGrowing: Boolean = false,
    val isError: Boolean = false,
    val pictures: List<Picture> = emptyList(),
)

/**
 * What the chat screen shows beside the host's state. [pictures] go with the next message; while [isAttaching] another one is opened.
 * [problem] says why one could not be.
 */
data class ChatState(
    val messages: List<Message> = emptyList(),
    val isGenerating: Boolean = false,
    val pictures: List<Picture> = emptyList(),
    val isAttaching: Boolean = false,
    val problem: String? = null,
)

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
    private val io: CoroutineDispatcher = Dispatchers.IO,
) {
    private val mutableState = MutableStateFlow(ChatState())
    private var generating: Job? = null

    val state: StateFlow<ChatState> = mutableState

    /** Opens a picture, on another thread, that goes with the next message. What is wrong with it is said in [state]. */
    fun attach(open: () -> Picture) {
        if (mutableState.value.isAttaching) return
        mutableState.update { it.copy(isAttaching = true, problem = null) }
        scope.launch {
            try {
                val picture = withContext(io) { open() }
                mutableState.update { it.copy(pictures = it.pictures + picture) }
            } catch (error: LesonnxError) {
                mutableState.update { it.copy(problem = error.message) }
            } finally {
                mutableState.update { it.copy(isAttaching = false) }
            }
        }
    }

    /** Takes a picture back that was to go with the next message. */
    fun remove(picture: Picture) = mutableState.update { state -> state.copy(pictures = state.pictures.filter { it !== picture }, problem = null) }

    /**
     * Sends a text, with the pictures that were attached, and lets the answer grow in [state]; gives whether it does. Not while another answer
     * grows or a picture is opened, and not without a text or a picture.
     */
    fun send(text: String): Boolean {
        val before = mutableState.value
        if (before.isGenerating || before.isAttaching || (text.isBlank() && before.pictures.isEmpty())) return false
        val history = before.messages
        val asked = Message(Author.USER, text, pictures = before.pictures)
        mutableState.value = ChatState(history + asked + Message(Author.MODEL, "", isGrowing = true), isGenerating = true)
        generating = scope.launch {
            try {
                val answered = host.use { model -> answer(model, history, asked) }
                if (answered == null) end { it.copy(text = "No bundle is loaded.", isError = true) }
            } catch (error: LesonnxError) {
                end { it.copy(text = it.text, note = error.message, isError = true) }
            } finally {
                // Where it was stopped, nothing has ended it yet.
                end { if (it.isGrowing) it.copy(note = "Stopped") else it }
            }
        }
        return true
    }

    /** Stops the answer that grows; what has come stays. */
    fun stop() {
        generating?.cancel()
    }

    /** Begins anew. */
    fun clear() {
        mutableState.update { if (it.isGenerating) it else it.copy(messages = emptyList(), problem = null) }
    }

    private suspend fun answer(model: Model, history: List<Message>, asked: Message) {
        val generation = if (model.hasChat) model.chat(conversation(model, history, asked), options) else model.generate(asked.text, options, asked.pictures)
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

    /** What was answered so far, then what is asked; a question that came to nothing would come to nothing again. */
    private fun conversation(model: Model, history: List<Message>, asked: Message): List<ChatMessage> {
        val answered = history.chunked(2).filter { turn -> turn.last().run { text.isNotEmpty() && !isError } }.flatten()
        // Another bundle may have been loaded since, which takes no pictures.
        val seen = if (model.whyNoPictures == null) answered else answered.map { it.copy(pictures = emptyList()) }
        return (seen + asked).map { ChatMessage(if (it.author == Author.USER) ChatRole.USER else ChatRole.ASSISTANT, it.text, it.pictures) }
    }

    private fun end(change: (Message) -> Message) = mutableState.update { state ->
        state.withLast { change(it).copy(isGrowing = false) }.copy(isGenerating = false)
    }

    private fun ChatState.withLast(change: (Message) -> Message): ChatState =
        if (messages.isEmpty()) this else copy(messages = messages.dropLast(1) + change(messages.last()))

    private fun noteOf(report: GenerationReport): String {
        val speed = "%d tokens, %.1f tokens/s".format(Locale.ROOT, report.tokenIds.size, report.tokensPerS)
        return if (report.visionMs == 0.0) speed else "%s, pictures read in %.1f s".format(Locale.ROOT, speed, report.visionMs / 1e3)
    }

    companion object {
        val DEFAULT_OPTIONS = GenerationOptions(sampling = SamplingOptions(temperature = 0.7, topP = 0.9, seed = 1u))
    }
}
