package dev.lesonnx.app.ui

import android.view.Gravity
import android.view.View
import android.widget.LinearLayout
import android.widget.TextView
import dev.lesonnx.app.model.BenchmarkModel
import dev.lesonnx.app.model.BenchmarkState
import dev.lesonnx.app.model.HostState
import dev.lesonnx.app.model.Rung
import dev.lesonnx.app.model.RungResult
import dev.lesonnx.store.formatBytes

/** The ladder of schedules on this device. [share] hands the table over as text, [showBundles] leads to the bundles. */
class BenchmarkScreen(
    private val theme: Theme,
    private val model: BenchmarkModel,
    private val share: (String) -> Unit,
    private val showBundles: () -> Unit,
) {
    private val content = theme.column(gap = 14).padded(theme, 16, 8)
    private var progress: Progress? = null
    private var shown: BenchmarkState? = null
    private var shownHost: HostState? = null

    val view: View = theme.column(
        theme.header("Benchmark", theme.quiet("The same prompt under every schedule")),
        theme.scrolling(content).fill(),
    )

    fun render(state: BenchmarkState, host: HostState) {
        val before = shown
        val onlyProgress = before != null && shownHost == host && before.copy(running = null) == state.copy(running = null)
        shown = state
        shownHost = host
        if (!onlyProgress || (before.running == null) != (state.running == null)) content.show(cards(state, host))
        state.running?.let { (rung, part) -> progress?.show(rung, part) }
    }

    private fun cards(state: BenchmarkState, host: HostState): List<View> {
        progress = if (state.isRunning) Progress() else null
        val hasNothing = state.results.isEmpty() && !state.isRunning
        return listOfNotNull(
            state.problem?.let { theme.notice(it, Tone.ERROR) },
            if (hasNothing) introduction(host).apply { layoutParams = fillHeight() } else null,
            progress?.view,
            if (state.results.isEmpty()) null else bars(state),
            if (state.results.isEmpty()) null else table(state.results),
            if (state.results.isEmpty() || state.isRunning) null else actions(state, host),
        )
    }

    private fun introduction(host: HostState): View = when (host) {
        is HostState.Ready -> theme.emptyState(
            Icon.BARS,
            "Seven rows, one prompt",
            "Each adds a technique to the one before. ${host.name} is loaded anew for each, with a quarter of its experts in memory.",
            theme.button("Measure", Icon.RUN, isMain = true) { model.run() },
        )
        is HostState.Loading -> theme.emptyState(Icon.BUNDLES, "Loading", "${host.name} is being opened.")
        else -> theme.emptyState(
            Icon.BUNDLES,
            "No bundle is loaded",
            "Load one, and its schedules can be compared.",
            theme.button("Show bundles", isMain = true, onClick = showBundles),
        )
    }

    private fun bars(state: BenchmarkState): View {
        val most = state.results.maxOf { it.tokensPerSecond }
        val rows = state.results.map { result ->
            val bar = ShareBar(theme, heightDp = 10, ink = if (result.rung == Rung.SERIAL) theme.palette.quiet else theme.palette.accent)
            bar.show((result.tokensPerSecond / most).toFloat())
            theme.column(
                theme.row(
                    theme.text(result.rung.title, Type.SMALL).share(),
                    theme.text(figure(result.tokensPerSecond), Type.LABEL),
                    gap = 8,
                ),
                bar,
                gap = 6,
            )
        }
        return theme.card(
            theme.row(theme.text("Tokens per second", Type.HEADING).share(), *ratio(state)),
            theme.quiet(state.setting.orEmpty()),
            *rows.toTypedArray(),
            gap = 14,
        )
    }

    private fun ratio(state: BenchmarkState): Array<View> {
        if (!state.isComplete) return emptyArray()
        val times = state.results.last().tokensPerSecond / state.results.first().tokensPerSecond
        return arrayOf(theme.chip("${fixed(times, 2)} × serial", Tone.ACCENT))
    }

    private fun table(results: List<RungResult>): View {
        val head = tableRow("", "hits", "late", "read", "waits", Type.TINY, theme.palette.quiet)
        val rows = results.map { result ->
            tableRow(
                result.rung.title,
                percent(result.hitRate),
                percent(result.lateRate),
                formatBytes(result.readBytes),
                "${figure(result.stallMs)} ms",
                Type.TINY,
                theme.palette.text,
            )
        }
        val drafts = results.firstNotNullOfOrNull { it.drafts }?.let { listOf(theme.quiet("Drafted tokens: ${acceptedOf(it)}")) }.orEmpty()
        return theme.card(theme.text("A token, on average", Type.HEADING), head, *rows.toTypedArray(), *drafts.toTypedArray(), gap = 12)
    }

    private fun tableRow(name: String, hits: String, late: String, read: String, waits: String, type: Type, color: Int): LinearLayout {
        fun cell(text: String, weight: Float) = theme.text(text, type, color).apply {
            gravity = Gravity.END
            maxLines = 1
            share(weight)
        }
        return theme.row(
            theme.text(name, type, color).share(NAME_SHARE),
            cell(hits, 1f),
            cell(late, 1f),
            cell(read, WIDE_SHARE),
            cell(waits, WIDE_SHARE),
            gap = 6,
        )
    }

    private fun actions(state: BenchmarkState, host: HostState): View {
        val again = theme.button("Measure again", Icon.RUN, isMain = true) { model.run() }
        again.enabled(host is HostState.Ready)
        return theme.row(theme.button("Share") { share(state.asText()) }.share(), again.share(2f), gap = 10)
    }

    /** The rung at work. */
    private inner class Progress {
        private val name: TextView = theme.text("Loading", Type.LABEL)
        private val bar = ShareBar(theme)
        val view: LinearLayout = theme.card(
            theme.row(name.share(), theme.button("Stop", Icon.STOP) { model.stop() }, gap = 8),
            bar,
        )

        fun show(rung: Rung, part: Float) {
            name.text = if (part == 0f) "${rung.title}: loading" else rung.title
            bar.show((rung.ordinal + part) / Rung.entries.size)
        }
    }

    private companion object {
        const val NAME_SHARE = 2.6f
        const val WIDE_SHARE = 1.4f
    }
}
