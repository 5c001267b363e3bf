package dev.lesonnx

/** The router's choice for the rows of one layer: for each row its experts (`expert_idx`), strongest first. */
internal class Routing(private val shape: LayerShape, private val rows: Array<IntArray>) {
    /** Whether every row names different experts of the layer, at most as many as a token has, and some row one at all. */
    fun isPossible(): Boolean = rows.all(::isPossible) && rows.any { it.isNotEmpty() }

    private fun isPossible(row: IntArray): Boolean {
        if (row.size > shape.numExpertsPerTok) return false
        for (i in row.indices) {
            if (row[i] !in 0 until shape.numExperts) return false
            for (j in 0 until i) if (row[j] == row[i]) return false
        }
        return true
    }

    /** The experts used. One row keeps the router's order, strongest first; several load in the order of the pack. */
    fun used(): IntArray {
        if (rows.size == 1) return rows[0].copyOf()
        val isUsed = BooleanArray(shape.numExperts)
        for (row in rows) for (expertIdx in row) isUsed[expertIdx] = true
        val used = IntList(shape.numExperts)
        for (expertIdx in isUsed.indices) if (isUsed[expertIdx]) used.add(expertIdx)
        return used.toIntArray()
    }
}
