package dev.lesonnx

/** The stream of O'Neill's demonstration program; every sampler uses it. */
internal const val PCG_STREAM = 54L

/**
 * PCG-XSH-RR with 64 bits of state and 32 of output: one draw, one number. Not thread-safe; its owner alone draws.
 *
 * Source: Melissa O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for Random Number
 * Generation", Harvey Mudd College HMC-CS-2014-0905; `pcg32_srandom_r` and `pcg32_random_r` of pcg-c-basic. It starts from
 * `seed` (64 bits) on one of 2**63 streams.
 */
internal class Pcg32(seed: ULong, stream: Long = PCG_STREAM) {
    private val increment = (stream shl 1) or 1
    private var state = 0L

    init {
        nextBits()
        state += seed.toLong()
        nextBits()
    }

    /** The next 32 random bits. */
    fun nextBits(): UInt {
        val old = state
        state = old * MULTIPLIER + increment
        val shifted = (((old ushr 18) xor old) ushr 27).toInt()
        return shifted.rotateRight((old ushr 59).toInt()).toUInt()
    }

    /** One draw in [0, 1): a multiple of 2**-32. */
    fun uniform(): Double = nextBits().toDouble() * (1.0 / (1L shl 32))

    private companion object {
        const val MULTIPLIER = 6364136223846793005L
    }
}
