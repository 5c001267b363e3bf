package dev.lesonnx.app.ui

import android.text.InputType
import android.text.TextUtils
import android.view.Gravity
import android.view.View
import android.view.inputmethod.EditorInfo
import android.widget.LinearLayout
import android.widget.TextView
import dev.lesonnx.app.model.Author
import dev.lesonnx.app.model.ChatModel
import dev.lesonnx.app.model.ChatState
import dev.lesonnx.app.model.HostState
import dev.lesonnx.app.model.Message
import dev.lesonnx.store.formatBytes

/**
 * A conversation with the loaded model, or completion where its bundle has no chat format. [pickPicture] lets a person choose one for the next
 * message, [showBundles] leads to the bundles.
 */
class ChatScreen(private val theme: Theme, private val model: ChatModel, pickPicture: () -> Unit, private val showBundles: () -> Unit) {
    private val under = theme.quiet("").apply {
        maxLines = 1
        ellipsize = TextUtils.TruncateAt.END
    }
    private val clear = theme.iconButton(Icon.CLEAR, "Clear the conversation") { model.clear() }
    private val list = theme.column(gap = 12).padded(theme, 16, 8)
    private val scroll = theme.scrolling(list)
    private val input = theme.field("").apply {
        inputType = InputType.TYPE_CLASS_TEXT or InputType.TYPE_TEXT_FLAG_MULTI_LINE or InputType.TYPE_TEXT_FLAG_CAP_SENTENCES
        imeOptions = EditorInfo.IME_FLAG_NO_EXTRACT_UI
        maxLines = 5
        background = theme.rounded(theme.palette.surface, 24, theme.palette.outline)
        padded(theme, 18, 12)
    }
    private val send = theme.iconButton(Icon.SEND, "Send", theme.palette.onAccent, theme.palette.accent) { submit() }
    private val stop = theme.iconButton(Icon.STOP, "Stop", theme.palette.onAccent, theme.palette.accent) { model.stop() }
    private val pick = theme.iconButton(Icon.PICTURE, PICK, onClick = pickPicture)
    private val tray = PictureTray(theme, model::remove)
    private val entry = theme.column(tray.view, theme.row(pick, input.share(), send, stop, gap = 10), gap = 8).padded(theme, 16, 10)
    private var shown: ChatState? = null
    private var shownHost: HostState? = null
    private var growing: Bubble? = null

    val view: View = theme.column(theme.header("Chat", under, clear), scroll.fill(), entry)

    fun render(state: ChatState, host: HostState) {
        val before = shown
        shown = state
        if (host != shownHost || before?.messages?.isEmpty() != state.messages.isEmpty()) {
            shownHost = host
            showHost(host)
        }
        showMessages(before, state, host)
        tray.render(state)
        pick.enabled(!state.isAttaching && (host as? HostState.Ready)?.whyNoPictures == null)
        send.visibility = if (state.isGenerating) View.GONE else View.VISIBLE
        stop.visibility = if (state.isGenerating) View.VISIBLE else View.GONE
        clear.visibility = if (state.messages.isEmpty() || state.isGenerating) View.GONE else View.VISIBLE
    }

    private fun showHost(host: HostState) {
        under.text = when (host) {
            HostState.Empty -> "No bundle is loaded"
            is HostState.Loading -> "Loading ${host.name} …"
            is HostState.Measuring -> "${host.name} is being measured"
            is HostState.Failed -> "${host.name} could not be loaded"
            is HostState.Ready -> "${host.name} · ${host.engine} engine · ${formatBytes(host.expertBytes)} for experts"
        }
        val isReady = host is HostState.Ready
        entry.visibility = if (isReady) View.VISIBLE else View.GONE
        if (host is HostState.Ready) {
            input.hint = if (host.canChat) "Message" else "Begin a text"
            pick.contentDescription = host.whyNoPictures?.let { "No pictures: $it" } ?: PICK
        }
    }

    private fun showMessages(before: ChatState?, state: ChatState, host: HostState) {
        if (state.messages.isEmpty()) {
            growing = null
            list.show(listOf(empty(host).apply { layoutParams = fillHeight() }))
            return
        }
        val old = before?.messages.orEmpty()
        val last = state.messages.last()
        val onlyLastGrew = growing != null && old.size == state.messages.size && old.dropLast(1) == state.messages.dropLast(1)
        if (onlyLastGrew) {
            growing?.show(last)
        } else if (old != state.messages) {
            val bubbles = state.messages.map { Bubble(it.author).apply { show(it) } }
            growing = bubbles.last()
            list.show(bubbles.map { it.view })
        }
        scroll.post { scroll.fullScroll(View.FOCUS_DOWN) }
    }

    private fun empty(host: HostState): View = when (host) {
        is HostState.Ready ->
            if (host.canChat) theme.emptyState(Icon.CHAT, "Say something", "The model runs on this phone. Nothing leaves it.${noPictures(host)}")
            else theme.emptyState(Icon.CHAT, "Begin a text", "This bundle has no chat format, so the model goes on from what you write.${noPictures(host)}")
        is HostState.Loading -> theme.emptyState(Icon.BUNDLES, "Loading", "${host.name} is being opened.")
        is HostState.Measuring -> theme.emptyState(Icon.BARS, "Busy", "A benchmark has ${host.name}. It is loaded again when that ends.")
        is HostState.Failed -> theme.emptyState(
            Icon.WARNING,
            "Not loaded",
            host.message,
            theme.button("Show bundles", onClick = showBundles),
        )
        HostState.Empty -> theme.emptyState(
            Icon.BUNDLES,
            "No bundle is loaded",
            "Choose one, and the conversation can begin.",
            theme.button("Show bundles", isMain = true, onClick = showBundles),
        )
    }

    private fun noPictures(host: HostState.Ready) = host.whyNoPictures?.let { "\n\nNo pictures: $it." }.orEmpty()

    private fun submit() {
        // Sending shows the message at once, and what is typed is not in it any more.
        val text = input.text.toString()
        if (model.send(text)) input.text.clear()
    }

    /** One message: a user's on the right in colour, the model's on the left. */
    private inner class Bubble(private val author: Author) {
        private val words = theme.text("").apply { setTextIsSelectable(true) }
        private val note = theme.quiet("", Type.TINY)
        private val pictures = theme.row(gap = 6)
        private val sheet = theme.column(pictures, words, gap = 8)
        val view: LinearLayout = theme.column(sheet, note, gap = 6)

        init {
            val isUser = author == Author.USER
            val side = theme.dp(48)
            sheet.layoutParams = narrow().apply {
                gravity = if (isUser) Gravity.END else Gravity.START
                if (isUser) leftMargin = side else rightMargin = theme.dp(16)
            }
            val fill = if (isUser) theme.palette.accentSoft else theme.palette.surface
            sheet.background = theme.rounded(fill, 18, if (isUser) null else theme.palette.outline)
            sheet.padded(theme, 16, 12)
            note.padded(theme, 6, 0)
        }

        fun show(message: Message) {
            setText(words, if (message.isGrowing) "${message.text}$CURSOR" else message.text)
            words.visibility = if (words.text.isEmpty()) View.GONE else View.VISIBLE
            if (pictures.childCount != message.pictures.size) pictures.show(message.pictures.map { theme.thumbnail(it, BUBBLE_PICTURE) })
            pictures.visibility = if (message.pictures.isEmpty()) View.GONE else View.VISIBLE
            sheet.visibility = if (words.text.isEmpty() && message.pictures.isEmpty()) View.GONE else View.VISIBLE
            words.setTextColor(if (message.isError && message.note == null) theme.palette.error else theme.palette.text)
            note.visibility = if (message.note == null) View.GONE else View.VISIBLE
            note.setTextColor(if (message.isError) theme.palette.error else theme.palette.quiet)
            setText(note, message.note.orEmpty())
        }

        private fun setText(view: TextView, text: String) {
            if (view.text.toString() != text) view.text = text
        }
    }

    private companion object {
        const val CURSOR = "▍"
        const val PICK = "Add a picture"

        /** In dp. */
        const val BUBBLE_PICTURE = 88
    }
}
