package dev.lesonnx

import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable

/** A model beside twins that runs on the CPU provider: [Positions] or a [Selection]. */
sealed interface TwinHelper {
    val path: String
    val inputs: List<Value>
    val outputs: List<Value>
}

/** What all twins of a step take beside activations and caches; run once a step. */
@Serializable
data class Positions(override val path: String, override val inputs: List<Value>, override val outputs: List<Value>) : TwinHelper

/** A segment's router after its logits: what its twins end at -> what the segment gives. */
@Serializable
data class Selection(
    val part: String,
    override val path: String,
    override val inputs: List<Value>,
    override val outputs: List<Value>,
) : TwinHelper

/**
 * A part once more, with fixed shapes, of operators that accelerators take; for steps of exactly [rows] tokens.
 *
 * All sizes of its inputs and outputs are numbers. [providers] in order of preference; no target, no use there.
 */
@Serializable
data class Twin(
    val part: String,
    val rows: Int,
    val path: String,
    val inputs: List<Value>,
    val outputs: List<Value>,
    val providers: Map<Target, List<Provider>> = emptyMap(),
)

/**
 * Twins of segments and head, and what they need; see `docs/bundle.md`. Immutable, safe to share.
 *
 * [capacityTokens] is the capacity of attention caches that twins take. Twins round otherwise than their parts: results of a step
 * depend on which of them it used, so bits are not the same over step widths, and [exactOverWidths] is false.
 */
@Serializable
data class TwinsRecord(
    @SerialName("capacity_tokens") val capacityTokens: Int,
    @SerialName("float_bits") val floatBits: Int,
    @SerialName("exact_over_widths") val exactOverWidths: Boolean = false,
    val data: String,
    val positions: Positions,
    val selections: List<Selection>,
    val parts: List<Twin>,
) {
    /** What runs on the CPU provider beside twins. */
    val helpers: List<TwinHelper> get() = listOf(positions) + selections

    /** Every file of them, once. */
    val paths: Set<String> get() = setOf(data) + helpers.map { it.path } + parts.map { it.path }

    /** A part's twin for steps of that many tokens; null where there is none. */
    fun of(part: String, rows: Int): Twin? = parts.find { it.part == part && it.rows == rows }
}

/** The output of a twin that holds the step's rows of the state whose part calls its output so. */
internal fun rowsName(output: String): String = "${output}_rows"

/** What twins of the head call pieces of the logits. */
internal const val LOGITS_PREFIX = "logits_"
