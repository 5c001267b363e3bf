package dev.lesonnx

/** What `target_layer_ids` calls the embedding's output. */
internal const val EMBEDDING_IDX = -1

/** What parts call the output of a layer; that of layer -1 is the embedding's. */
internal fun layerOutputName(layerIdx: Int): String = if (layerIdx == EMBEDDING_IDX) "hidden" else "layer_output_$layerIdx"

/** Is told what some layers of the model give, step by step: a drafter, see `dev.lesonnx.speculative`. Not thread-safe. */
internal interface LayerReader {
    /** The layers whose outputs it reads, in its order ([EMBEDDING_IDX] the embedding); empty for none. */
    val layerIdxs: List<Int>

    /** T tokens have run from [position] on: [layerOutputs] float32 [T, n*H] of [layerIdxs] side by side, the runner's tensor. */
    fun observe(position: Int, layerOutputs: Tensor)

    /** What it keeps for a sequence of that many tokens. */
    fun bytesAt(numTokens: Int): Long
}
