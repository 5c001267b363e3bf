// Prints all that a ModelSpec says, a line each, for tests/test_glue.py. Texts are given as UTF-16 in hexadecimal.
package dev.lesonnx.glue.test

import dev.`in`.generated.ModelSpec

private fun hex(text: String): String = text.map { "%04x".format(it.code) }.joinToString("")

public fun main() {
    val spec = ModelSpec
    println("title ${hex(spec.TITLE)}")
    println("bytes ${spec.DOWNLOAD_BYTES} ${spec.DENSE_BYTES} ${spec.EXPERT_BYTES} ${spec.LEAST_BUDGET_BYTES} ${spec.TOKEN_DEMAND_BYTES} ${spec.STATE_BYTES_PER_TOKEN} ${spec.FIXED_STATE_BYTES}")
    println("model ${spec.MODEL_TYPE} ${spec.HIDDEN_SIZE} ${spec.NUM_HIDDEN_LAYERS} ${spec.VOCAB_SIZE} ${spec.NUM_EXPERTS} ${spec.NUM_EXPERTS_PER_TOK} ${spec.MOE_INTERMEDIATE_SIZE} ${spec.MAX_POSITION_EMBEDDINGS} ${spec.NUM_PARAMETERS} ${spec.NUM_ACTIVE_PARAMETERS}")
    println("ids ${spec.EOS_TOKEN_IDS} ${spec.BOS_TOKEN_ID ?: "none"} ${spec.PAD_TOKEN_ID ?: "none"}")
    println("bits ${spec.EXPERT_BITS} ${spec.DENSE_BITS} ${spec.KV_BITS} ${spec.PREFILL_CHUNK_TOKENS} ${spec.ONNXRUNTIME_AT_LEAST}")
    for (budget in spec.BUDGETS) println("budget ${hex(budget.name)} ${budget.bytes}")
    for (part in spec.PARTS) {
        println("part ${part.name} ${part.role} ${part.path} ${part.layerIdx ?: "none"}")
        for (value in part.inputs) println("input ${value.name} ${value.dtype} ${value.shape}")
        for (value in part.outputs) println("output ${value.name} ${value.dtype} ${value.shape}")
        for (provider in part.providers) {
            println("provider ${provider.name} ${provider.options.toSortedMap().map { hex(it.key) + "=" + hex(it.value) }}")
        }
    }
    for (state in spec.STATES) {
        println("state ${state.name} ${state.kind} ${state.layerIdx} ${state.part} ${state.input} ${state.output} ${state.dtype} ${state.shape}")
    }
    for (kind in spec.EXPERT_KINDS) {
        println("kind ${kind.name} ${kind.hiddenSize} ${kind.intermediateSize} ${kind.activation} ${kind.bits} ${kind.lengthBytes} ${kind.costBytes}")
    }
    for (layer in spec.EXPERT_LAYERS) {
        println("layer ${layer.layerIdx} ${layer.pack} ${layer.numExperts} ${layer.numExpertsPerTok} ${layer.kind} ${layer.sharedKind ?: "none"} ${layer.packBytes} ${layer.demandBytes}")
    }
    val chat = spec.CHAT_FORMAT
    if (chat == null) println("chat none")
    if (chat != null) {
        println("chat ${hex(chat.start)} ${hex(chat.answer)}")
        for ((role, turn) in chat.messages.toSortedMap()) println("turn $role ${hex(turn.prefix)} ${hex(turn.suffix)}")
    }
    val vision = spec.VISION
    println(if (vision == null) "vision none" else "vision ${vision.maxSlices} ${vision.maxImageTokens} ${vision.visionBytes} ${vision.workingBytes}")
    spec.check(spec.MANIFEST_SHA256.uppercase())
    try {
        spec.check("0")
        println("check accepts anything")
    } catch (error: IllegalArgumentException) {
        println("check ${hex(error.message.orEmpty())}")
    }
}
