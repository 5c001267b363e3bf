package dev.lesonnx

/**
 * How to choose the next token; checked when made, InputError names the option.
 *
 * [temperature] 0 is greedy; [topK] 0, [topP] 1, [minP] 0 and [repetitionPenalty] 1 are off. Equal seeds give equal tokens for
 * equal logits, on every host.
 */
data class SamplingOptions(
    val temperature: Double = 0.0,
    val topK: Int = 0,
    val topP: Double = 1.0,
    val minP: Double = 0.0,
    val repetitionPenalty: Double = 1.0,
    val seed: ULong = 0u,
) {
    init {
        check("temperature", temperature, temperature >= 0, "at least 0")
        check("topK", topK, topK >= 0, "at least 0 (0 is off)")
        check("topP", topP, topP > 0 && topP <= 1, "above 0 and at most 1 (1 is off)")
        check("minP", minP, minP in 0.0..1.0, "from 0 (off) to 1")
        check("repetitionPenalty", repetitionPenalty, repetitionPenalty > 0, "above 0 (1 is off)")
    }

    private fun check(name: String, value: Number, holds: Boolean, expected: String) {
        if (!value.toDouble().isFinite()) throw InputError("$name is $value, expected a finite number")
        if (!holds) throw InputError("$name is $value, expected $expected")
    }
}
