package dev.lesonnx.app.ui

import dev.lesonnx.speculative.DraftCounts
import java.util.Locale
import kotlin.math.roundToInt

// Numbers as the screens write them.

/** A count such as 30.5 B or 8.1 M, three digits. */
fun count(value: Long): String {
    val (scaled, unit) = when {
        value >= 1_000_000_000 -> value / 1e9 to " B"
        value >= 1_000_000 -> value / 1e6 to " M"
        value >= 1_000 -> value / 1e3 to " k"
        else -> return value.toString()
    }
    return fixed(scaled, if (scaled < 10) 2 else 1) + unit
}

fun percent(share: Double): String = "${(share * 100).roundToInt()} %"

/** A figure with as many decimals as it has use for. */
fun figure(value: Double): String = fixed(value, if (value < 10) 2 else if (value < 100) 1 else 0)

fun fixed(value: Double, decimals: Int): String = "%.${decimals}f".format(Locale.ROOT, value)

/** How many drafted tokens stayed. */
fun acceptedOf(drafts: DraftCounts): String =
    "${count(drafts.accepted.sum().toLong())} of ${count(drafts.drafted.sum().toLong())} accepted, ${percent(drafts.share)}"
