package dev.lesonnx.app.ui

import android.content.res.ColorStateList
import android.graphics.drawable.GradientDrawable
import android.graphics.drawable.RippleDrawable
import android.text.TextUtils
import android.view.Gravity
import android.view.View
import android.view.ViewGroup
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.widget.EditText
import android.widget.ImageView
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView

// The views that screens are made of. Every one is a plain Android view with the theme's colours and measures.

/** What a line of text or a button is about, and so its colour. */
enum class Tone { PLAIN, ACCENT, GOOD, WARNING, ERROR }

fun Theme.color(tone: Tone): Int = when (tone) {
    Tone.PLAIN -> palette.text
    Tone.ACCENT -> palette.accent
    Tone.GOOD -> palette.good
    Tone.WARNING -> palette.warning
    Tone.ERROR -> palette.error
}

fun Theme.softColor(tone: Tone): Int = when (tone) {
    Tone.PLAIN -> palette.sunken
    Tone.ACCENT -> palette.accentSoft
    Tone.GOOD -> palette.goodSoft
    Tone.WARNING -> palette.warningSoft
    Tone.ERROR -> palette.errorSoft
}

fun Theme.text(text: CharSequence, type: Type = Type.BODY, color: Int = palette.text): TextView = TextView(context).apply {
    this.text = text
    textSize = type.sp
    typeface = if (type.isStrong) strong else plain
    setTextColor(color)
    includeFontPadding = false
    setLineSpacing(0f, if (type == Type.BODY) 1.25f else 1.15f)
}

fun Theme.quiet(text: CharSequence, type: Type = Type.SMALL): TextView = text(text, type, palette.quiet)

/** Views one under another, [gap] dp apart. */
fun Theme.column(vararg views: View, gap: Number = 0): LinearLayout = stack(LinearLayout.VERTICAL, views, gap)

/** Views side by side, [gap] dp apart, their middles on one line. */
fun Theme.row(vararg views: View, gap: Number = 0): LinearLayout =
    stack(LinearLayout.HORIZONTAL, views, gap).apply { gravity = Gravity.CENTER_VERTICAL }

private fun Theme.stack(direction: Int, views: Array<out View>, gap: Number): LinearLayout = LinearLayout(context).apply {
    orientation = direction
    dividerDrawable = GradientDrawable().apply { setSize(dp(gap), dp(gap)) }
    showDividers = LinearLayout.SHOW_DIVIDER_MIDDLE
    for (view in views) {
        if (view.layoutParams != null) addView(view) else addView(view, if (direction == LinearLayout.VERTICAL) wide() else narrow())
    }
}

fun wide(height: Int = WRAP_CONTENT) = LinearLayout.LayoutParams(MATCH_PARENT, height)

fun narrow() = LinearLayout.LayoutParams(WRAP_CONTENT, WRAP_CONTENT)

/** Takes its share of what the others in a row leave. */
fun <V : View> V.share(weight: Float = 1f): V = apply { layoutParams = LinearLayout.LayoutParams(0, WRAP_CONTENT, weight) }

/** As high as what there is, in a column that fills a scrolling view. */
fun fillHeight() = LinearLayout.LayoutParams(MATCH_PARENT, MATCH_PARENT, 1f)

/** As high as what the others in a column leave. */
fun <V : View> V.fill(): V = apply { layoutParams = LinearLayout.LayoutParams(MATCH_PARENT, 0, 1f) }

fun <V : View> V.padded(theme: Theme, horizontal: Number, vertical: Number = horizontal): V = apply {
    setPadding(theme.dp(horizontal), theme.dp(vertical), theme.dp(horizontal), theme.dp(vertical))
}

fun Theme.rounded(fill: Int, radius: Number = 14, outline: Int? = null): GradientDrawable = GradientDrawable().apply {
    setColor(fill)
    cornerRadius = dp(radius).toFloat()
    if (outline != null) setStroke(dp(1), outline)
}

/** A sheet of surface with an outline. */
fun Theme.card(vararg views: View, gap: Number = 10): LinearLayout = column(*views, gap = gap).apply {
    background = rounded(palette.surface, outline = palette.outline)
    padded(this@card, 16, 16)
}

/** A word on a soft ground. */
fun Theme.chip(text: String, tone: Tone): TextView = text(text, Type.TINY, color(tone)).apply {
    typeface = strong
    background = rounded(softColor(tone), 20)
    padded(this@chip, 10, 5)
    maxLines = 1
}

/** A line of news on a soft ground, with an icon. */
fun Theme.notice(text: String, tone: Tone): LinearLayout = row(
    icon(if (tone == Tone.GOOD) Icon.CHECK else Icon.WARNING, color(tone), 18),
    text(text, Type.SMALL, color(tone)).share(),
    gap = 10,
).apply {
    background = rounded(softColor(tone), 10)
    padded(this@notice, 12, 10)
    accessibilityLiveRegion = View.ACCESSIBILITY_LIVE_REGION_POLITE
}

fun Theme.icon(icon: Icon, color: Int, size: Number = 22): ImageView = ImageView(context).apply {
    setImageDrawable(IconDrawable(icon, color, dp(size)))
    importantForAccessibility = View.IMPORTANT_FOR_ACCESSIBILITY_NO
}

/** A filled button where [isMain], else one with an outline. */
fun Theme.button(text: String, icon: Icon? = null, isMain: Boolean = false, tone: Tone = Tone.ACCENT, onClick: () -> Unit): View {
    val ink = if (isMain) palette.onAccent else color(tone)
    val label = text(text, Type.LABEL, ink).apply {
        maxLines = 1
        ellipsize = TextUtils.TruncateAt.END
    }
    val views = if (icon == null) arrayOf(label) else arrayOf(icon(icon, ink, 18), label)
    return row(*views, gap = 8).apply {
        gravity = Gravity.CENTER
        minimumHeight = dp(48)
        padded(this@button, 16, 8)
        val shape = if (isMain) rounded(palette.accent, 12) else rounded(palette.surface, 12, palette.outline)
        pressable(this, shape, ink, onClick)
    }
}

/** Whether a button can be pressed. */
fun <V : View> V.enabled(isEnabled: Boolean): V = apply {
    this.isEnabled = isEnabled
    alpha = if (isEnabled) 1f else DISABLED_ALPHA
}

private const val DISABLED_ALPHA = 0.45f

/** A square button that is an icon; [label] is what a screen reader says. */
fun Theme.iconButton(icon: Icon, label: String, color: Int = palette.quiet, fill: Int? = null, onClick: () -> Unit): ImageView =
    icon(icon, color, 22).apply {
        contentDescription = label
        importantForAccessibility = View.IMPORTANT_FOR_ACCESSIBILITY_YES
        scaleType = ImageView.ScaleType.CENTER
        layoutParams = LinearLayout.LayoutParams(dp(48), dp(48))
        pressable(this, rounded(fill ?: 0, 24), color, onClick)
    }

private fun Theme.pressable(view: View, shape: GradientDrawable, ink: Int, onClick: () -> Unit) {
    val mask = GradientDrawable().apply {
        setColor(ink)
        cornerRadius = shape.cornerRadius
    }
    view.background = RippleDrawable(ColorStateList.valueOf(ink and 0x00FFFFFF or (0x2E shl 24)), shape, mask)
    view.isFocusable = true
    view.setOnClickListener { onClick() }
}

fun Theme.field(hint: String): EditText = EditText(context).apply {
    this.hint = hint
    textSize = Type.BODY.sp
    setTextColor(palette.text)
    setHintTextColor(palette.quiet)
    background = rounded(palette.surface, 12, palette.outline)
    padded(this@field, 14, 12)
    minHeight = dp(48)
}

/** A few choices of which one holds. */
fun Theme.choice(labels: List<String>, chosen: Int, onChoose: (Int) -> Unit): LinearLayout {
    val views = labels.mapIndexed { place, label ->
        text(label, Type.SMALL, if (place == chosen) palette.text else palette.quiet).apply {
            gravity = Gravity.CENTER
            typeface = strong
            maxLines = 1
            minHeight = dp(40)
            padded(this@choice, 6, 8)
            val shape = if (place == chosen) rounded(palette.surface, 9, palette.outline) else rounded(0, 9)
            pressable(this, shape, palette.accent) { onChoose(place) }
            isSelected = place == chosen
            share()
        }
    }
    return row(*views.toTypedArray(), gap = 2).apply {
        background = rounded(palette.sunken, 12)
        padded(this@choice, 3, 3)
    }
}

/** A name on the left, what it is on the right. */
fun Theme.fact(name: String, value: String, tone: Tone = Tone.PLAIN): LinearLayout =
    row(quiet(name).share(), text(value, Type.SMALL, color(tone)).apply { typeface = strong }, gap = 12)

/** An icon, a headline and a sentence, for a screen that has nothing to show yet. */
fun Theme.emptyState(icon: Icon, title: String, text: String, vararg actions: View): LinearLayout = column(
    icon(icon, palette.accent, 34).apply {
        scaleType = ImageView.ScaleType.CENTER
        background = rounded(palette.accentSoft, 36)
        layoutParams = LinearLayout.LayoutParams(dp(72), dp(72))
    },
    text(title, Type.HEADING).apply { gravity = Gravity.CENTER },
    quiet(text, Type.BODY).apply { gravity = Gravity.CENTER },
    *actions.onEach { it.layoutParams = narrow().apply { topMargin = dp(6) } },
    gap = 14,
).apply {
    gravity = Gravity.CENTER
    padded(this@emptyState, 32, 40)
}

/** A screen's headline with a line under it. */
fun Theme.header(title: String, under: TextView? = null, vararg actions: View): LinearLayout {
    val words = if (under == null) column(text(title, Type.TITLE)) else column(text(title, Type.TITLE), under, gap = 4)
    return row(words.share(), *actions, gap = 4).apply {
        padded(this@header, 20, 14)
        minimumHeight = dp(72)
    }
}

fun Theme.scrolling(content: View): ScrollView = ScrollView(context).apply {
    isFillViewport = true
    isVerticalScrollBarEnabled = true
    clipToPadding = false
    addView(content, ViewGroup.LayoutParams(MATCH_PARENT, WRAP_CONTENT))
}

/** Shows [views] instead of what was there; without any it takes no room. */
fun ViewGroup.show(views: List<View>) {
    removeAllViews()
    visibility = if (views.isEmpty()) View.GONE else View.VISIBLE
    for (view in views) if (view.layoutParams != null) addView(view) else addView(view, wide())
}
