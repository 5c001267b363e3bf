package dev.lesonnx

import java.nio.LongBuffer

/**
 * The tokens that a runner has run, and where they are: their positions, and the pictures that image tokens belong to.
 *
 * It does not know how long it is: whoever has the states does, and states a smaller number to go back. What lies behind is written
 * over. Not thread-safe.
 */
internal class TokenSequence(private val positionRows: Int) {
    private var tokens = IntArray(GROWTH_TOKENS)

    // Of models that take pictures only; elsewhere a token's position is its place.
    private val hasPictures = positionRows > 1
    private val positions = Array(if (hasPictures) positionRows else 0) { IntArray(GROWTH_TOKENS) }

    // The greatest position of each token and those before it: the next token's is one more.
    private var greatest = IntArray(if (hasPictures) GROWTH_TOKENS else 0)
    private var keys = arrayOfNulls<String>(if (hasPictures) GROWTH_TOKENS else 0)

    /** Puts tokens behind the first [numTokens]: where [prompt] has them, whose token number [numTokens] is the first, or text. */
    fun put(numTokens: Int, tokenIds: IntArray, prompt: Prompt?) {
        reserve(numTokens + tokenIds.size)
        tokenIds.copyInto(tokens, numTokens)
        if (!hasPictures) return
        for (place in numTokens until numTokens + tokenIds.size) {
            val before = if (place == 0) -1 else greatest[place - 1]
            var most = before
            for ((row, places) in positions.withIndex()) {
                places[place] = prompt?.position(row, place) ?: (before + 1)
                most = maxOf(most, places[place])
            }
            greatest[place] = most
            keys[place] = prompt?.keyAt(place)
        }
    }

    /** Writes the positions of [count] tokens from [first] on to [target], row by row. */
    fun copyPositions(first: Int, count: Int, target: LongBuffer) {
        for (row in 0 until positionRows) {
            for (index in 0 until count) target.put(row * count + index, (if (hasPictures) positions[row][first + index] else first + index).toLong())
        }
    }

    /** How many of the first [most] tokens a prompt begins with: the same tokens, of the same pictures, at the same positions. */
    fun common(prompt: Prompt, most: Int): Int {
        var count = 0
        while (count < most && tokens[count] == prompt.tokenIds[count] && (!hasPictures || isSame(prompt, count))) count++
        return count
    }

    private fun isSame(prompt: Prompt, place: Int): Boolean =
        keys[place] == prompt.keyAt(place) && positions.indices.all { row -> positions[row][place] == prompt.position(row, place) }

    private fun reserve(numTokens: Int) {
        if (numTokens <= tokens.size) return
        val capacity = maxOf(numTokens, 2 * tokens.size)
        tokens = tokens.copyOf(capacity)
        if (!hasPictures) return
        for (row in positions.indices) positions[row] = positions[row].copyOf(capacity)
        greatest = greatest.copyOf(capacity)
        keys = keys.copyOf(capacity)
    }
}
