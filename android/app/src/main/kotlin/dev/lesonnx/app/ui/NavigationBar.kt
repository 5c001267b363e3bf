package dev.lesonnx.app.ui

import android.view.Gravity
import android.view.View
import android.widget.LinearLayout

/** The app's four places. */
enum class Tab(val title: String, val icon: Icon) {
    BUNDLES("Bundles", Icon.BUNDLES),
    CHAT("Chat", Icon.CHAT),
    TELEMETRY("Telemetry", Icon.PULSE),
    BENCHMARK("Benchmark", Icon.BARS),
}

/** The bar at the bottom that leads to them. */
class NavigationBar(private val theme: Theme, private val onChoose: (Tab) -> Unit) {
    private val row = theme.row().apply { setBackgroundColor(theme.palette.surface) }

    val view: View = theme.column(
        View(theme.context).apply {
            setBackgroundColor(theme.palette.outline)
            layoutParams = wide(theme.dp(1))
        },
        row,
    )

    fun show(chosen: Tab) {
        row.removeAllViews()
        for (tab in Tab.entries) row.addView(item(tab, tab == chosen))
    }

    private fun item(tab: Tab, isChosen: Boolean): View {
        val ink = if (isChosen) theme.palette.accent else theme.palette.quiet
        val icon = theme.icon(tab.icon, ink).apply {
            padded(theme, 16, 4)
            if (isChosen) background = theme.rounded(theme.palette.accentSoft, 16)
            layoutParams = narrow()
        }
        val label = theme.text(tab.title, Type.TINY, ink).apply {
            gravity = Gravity.CENTER
            typeface = if (isChosen) theme.strong else theme.plain
        }
        return theme.column(icon, label, gap = 4).apply {
            gravity = Gravity.CENTER_HORIZONTAL
            padded(theme, 0, 10)
            contentDescription = tab.title
            isSelected = isChosen
            isFocusable = true
            setOnClickListener { onChoose(tab) }
            layoutParams = LinearLayout.LayoutParams(0, LinearLayout.LayoutParams.WRAP_CONTENT, 1f)
        }
    }
}
