package dev.lesonnx.app.ui

import android.content.Context
import android.content.res.Configuration
import android.graphics.Color
import android.graphics.Typeface
import kotlin.math.roundToInt

/** The colours of the app, by what they are for; `second` is for a second line or bar beside the accent's. */
class Palette(
    val background: Int,
    val surface: Int,
    val sunken: Int,
    val outline: Int,
    val text: Int,
    val quiet: Int,
    val accent: Int,
    val onAccent: Int,
    val accentSoft: Int,
    val second: Int,
    val good: Int,
    val goodSoft: Int,
    val warning: Int,
    val warningSoft: Int,
    val error: Int,
    val errorSoft: Int,
    val isDark: Boolean,
) {
    companion object {
        val LIGHT = Palette(
            background = color("F5F4F0"),
            surface = color("FFFFFF"),
            sunken = color("ECEAE4"),
            outline = color("DEDBD3"),
            text = color("1B1D1C"),
            quiet = color("636660"),
            accent = color("0A6B5C"),
            onAccent = color("FFFFFF"),
            accentSoft = color("D6ECE6"),
            second = color("3D5FB0"),
            good = color("1D6B35"),
            goodSoft = color("DCEFDF"),
            warning = color("8A5200"),
            warningSoft = color("FBE9CC"),
            error = color("A8261C"),
            errorSoft = color("FADFDC"),
            isDark = false,
        )
        val DARK = Palette(
            background = color("111413"),
            surface = color("1B1F1D"),
            sunken = color("262B28"),
            outline = color("333936"),
            text = color("ECEEEA"),
            quiet = color("A2A9A4"),
            accent = color("62CDB7"),
            onAccent = color("00382E"),
            accentSoft = color("1D3D37"),
            second = color("9DB8F2"),
            good = color("84D396"),
            goodSoft = color("1C3A24"),
            warning = color("F0BA6A"),
            warningSoft = color("413012"),
            error = color("F5A199"),
            errorSoft = color("4A211D"),
            isDark = true,
        )

        private fun color(hex: String) = Color.parseColor("#$hex")
    }
}

/** The sizes of text, in sp. */
enum class Type(val sp: Float, val isStrong: Boolean = false) {
    TITLE(24f, isStrong = true),
    FIGURE(26f, isStrong = true),
    HEADING(17f, isStrong = true),
    BODY(16f),
    LABEL(15f, isStrong = true),
    SMALL(13.5f),
    TINY(12f),
}

/** Colours and measures of one activity. Screens build their views with it, so that all look alike. */
class Theme(val context: Context) {
    val palette: Palette = if (isDark(context)) Palette.DARK else Palette.LIGHT
    val strong: Typeface = Typeface.create("sans-serif-medium", Typeface.NORMAL)
    val plain: Typeface = Typeface.create("sans-serif", Typeface.NORMAL)
    val mono: Typeface = Typeface.create("monospace", Typeface.NORMAL)
    private val density = context.resources.displayMetrics.density

    fun dp(value: Number): Int = (value.toFloat() * density).roundToInt()

    companion object {
        fun isDark(context: Context): Boolean =
            context.resources.configuration.uiMode and Configuration.UI_MODE_NIGHT_MASK == Configuration.UI_MODE_NIGHT_YES
    }
}
