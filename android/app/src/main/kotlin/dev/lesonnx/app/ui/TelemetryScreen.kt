package dev.lesonnx.app.ui

import android.view.View
import android.widget.LinearLayout
import android.widget.TextView
import dev.lesonnx.app.model.TelemetryState
import dev.lesonnx.app.model.TimeShares
import dev.lesonnx.app.model.TokenSample
import dev.lesonnx.store.formatBytes

/** How the last tokens went: speed, hits, bytes and memory over time, and where the time goes. */
class TelemetryScreen(private val theme: Theme) {
    private val speed = Tile("tokens/s", theme.palette.accent)
    private val hits = Tile("hits", theme.palette.good)
    private val bytes = Tile("read a token", theme.palette.warning)
    private val memory = Tile("memory", theme.palette.second)
    private val inks = with(theme.palette) { listOf(accent, second, good, quiet, warning) }
    private val times = StackBar(theme, inks)
    private val legend = theme.column(gap = 8)
    private val totals = theme.column(gap = 8)
    private val events = theme.column(gap = 8)
    private val figures = theme.column(
        theme.row(speed.view.share(), hits.view.share(), gap = 12),
        theme.row(bytes.view.share(), memory.view.share(), gap = 12),
        theme.card(theme.text("Where a token's time goes", Type.HEADING), times, legend, gap = 12),
        theme.card(theme.text("Since the bundle was loaded", Type.HEADING), totals, gap = 12),
        gap = 12,
    )
    private val empty = theme.emptyState(
        Icon.PULSE,
        "Nothing measured yet",
        "Every token that the model generates leaves its figures here.",
    ).apply { layoutParams = fillHeight() }

    val view: View = theme.column(
        theme.header("Telemetry", theme.quiet("The last tokens, the newest at the right")),
        theme.scrolling(theme.column(events, empty, figures, gap = 12).padded(theme, 16, 8)).fill(),
    )

    fun render(state: TelemetryState) {
        val isEmpty = state.samples.isEmpty()
        empty.visibility = if (isEmpty) View.VISIBLE else View.GONE
        figures.visibility = if (isEmpty) View.GONE else View.VISIBLE
        events.visibility = if (state.events.isEmpty()) View.GONE else View.VISIBLE
        events.show(state.events.map { theme.notice(it, Tone.WARNING) })
        if (!isEmpty) showFigures(state)
    }

    private fun showFigures(state: TelemetryState) {
        speed.show(figure(state.tokensPerSecond), state.samples) { some -> 1e3 * some.size / some.sumOf { it.ms }.coerceAtLeast(1e-3) }
        hits.show(percent(state.hitRate), state.samples, top = 1f, ::hitShare)
        bytes.show(formatBytes(state.readPerToken), state.samples) { some -> some.sumOf { it.readBytes }.toDouble() / some.size }
        memory.show(formatBytes(state.samples.last().memoryBytes), state.samples) { some -> some.last().memoryBytes.toDouble() }
        showTimes(state.times)
        val total = state.total
        totals.show(
            listOfNotNull(
                theme.fact("Experts in memory, at most", "${formatBytes(state.expertBudgetBytes)} of ${formatBytes(state.expertBytes)}"),
                theme.fact("Required experts", "${count(total.hits)} hits, ${count(total.late)} late, ${count(total.misses)} misses"),
                theme.fact("Read", "${formatBytes(total.readBytes)} in ${count(total.loads)} loads"),
                theme.fact("Predicted loads", "${count(total.lookaheadUsed)} used, ${count(total.lookaheadWasted)} not"),
                state.drafts?.let { theme.fact("Drafted tokens, last text", acceptedOf(it)) },
                theme.fact("Most memory of the process", formatBytes(state.peakBytes)),
            ),
        )
    }

    private fun showTimes(shares: TimeShares) {
        val parts = listOf(
            "Dense parts" to shares.dense,
            "Experts" to shares.experts,
            "Lookahead" to shares.lookahead,
            "Scheduling" to shares.schedule,
            "Waiting for flash" to shares.stall,
        )
        times.show(FloatArray(parts.size) { parts[it].second.toFloat() })
        legend.show(
            parts.mapIndexed { place, (name, ms) ->
                val dot = View(theme.context).apply {
                    background = theme.rounded(inks[place], 5)
                    layoutParams = LinearLayout.LayoutParams(theme.dp(10), theme.dp(10))
                }
                val figure = theme.text("${fixed(ms, 2)} ms", Type.SMALL).apply { typeface = theme.strong }
                theme.row(dot, theme.quiet(name).share(), figure, gap = 10)
            },
        )
    }

    private fun hitShare(samples: List<TokenSample>): Double =
        samples.sumOf { it.hits }.toDouble() / samples.sumOf { it.hits + it.late + it.misses }.coerceAtLeast(1)

    /** A figure with its name and its course. */
    private inner class Tile(name: String, ink: Int) {
        private val figure: TextView = theme.text("", Type.FIGURE).apply { maxLines = 1 }
        private val graph = LineGraph(theme, ink)
        val view: LinearLayout = theme.card(theme.quiet(name), figure, graph, gap = 6)

        /** [of] gives the figure of some tokens in a row: the graph is drawn over a few at a time, since tokens differ. */
        fun show(text: String, samples: List<TokenSample>, top: Float = 0f, of: (List<TokenSample>) -> Double) {
            figure.text = text
            graph.show(FloatArray(samples.size) { of(samples.subList(maxOf(0, it + 1 - AT_A_TIME), it + 1)).toFloat() }, top)
        }
    }

    private companion object {
        const val AT_A_TIME = 8
    }
}
