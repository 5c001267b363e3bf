package dev.lesonnx

import java.util.PriorityQueue

/** Byte-pair merging: a word's characters become tokens, pairs of tokens become one, the earliest merge first. Immutable. */
internal class BpeModel(model: TokenizerFile.Model, private val table: TokenTable) {
    // By pair of ids, ascending: rank and result of a merge. Arrays, since there are a hundred thousand of them.
    private val pairs: LongArray
    private val ranks: IntArray
    private val results: IntArray
    private val ignoresMerges = model.ignoresMerges
    private val fusesUnknown = model.fusesUnknown
    private val unknown = model.unknownToken?.let(table::id)
    private val byteTokens: IntArray?

    init {
        require(model.type == "BPE") { "model '${model.type}' is not known" }
        require(model.dropout == null || model.dropout == 0.0) { "a model with dropout is not known" }
        require(model.continuingSubwordPrefix.isNullOrEmpty() && model.endOfWordSuffix.isNullOrEmpty()) { "a model with subword prefixes is not known" }
        val merges = model.merges.mapIndexed { rank, merge ->
            fun id(token: String) = requireNotNull(table.id(token)) { "merge $rank names '$token', which is no token" }
            Triple(pair(id(merge.first), id(merge.second)), rank, id(merge.first + merge.second))
        }.sortedBy { it.first }
        pairs = LongArray(merges.size) { merges[it].first }
        ranks = IntArray(merges.size) { merges[it].second }
        results = IntArray(merges.size) { merges[it].third }
        byteTokens = if (model.byteFallback) IntArray(256) { table.id("<0x%02X>".format(java.util.Locale.ROOT, it)) ?: NONE } else null
    }

    private fun pair(first: Int, second: Int): Long = first.toLong() shl 32 or second.toLong()

    /** The place of a pair's merge; negative where there is none. */
    private fun merge(first: Int, second: Int): Int = if (first < 0 || second < 0) NONE else pairs.binarySearch(pair(first, second))

    /** Appends a word's ids. */
    fun encode(word: String, ids: IntList) {
        if (word.isEmpty()) return
        val whole = if (ignoresMerges) table.id(word) else null
        if (whole != null) ids.add(whole) else Symbols(word).merged(ids)
    }

    /** The symbols of a word as a chain in which two become one. */
    private inner class Symbols(word: String) {
        private var count = 0
        private var tokens = IntArray(word.length)

        init {
            var place = 0
            var endsUnknown = false
            while (place < word.length) {
                val end = place + Character.charCount(word.codePointAt(place))
                val character = word.substring(place, end)
                val id = table.id(character)
                val bytes = if (id == null) bytes(character) else null
                when {
                    id != null -> add(id)
                    bytes != null -> bytes.forEach(::add)
                    unknown != null && !(fusesUnknown && endsUnknown) -> add(unknown)
                }
                endsUnknown = id == null && bytes == null
                place = end
            }
        }

        private val previous = IntArray(count) { it - 1 }
        private val next = IntArray(count) { if (it + 1 < count) it + 1 else NONE }

        private fun add(id: Int) {
            if (count == tokens.size) tokens = tokens.copyOf(4 * count)
            tokens[count++] = id
        }

        /** The tokens of a character's bytes, null where not all are there. */
        private fun bytes(character: String): IntArray? {
            val byteTokens = byteTokens ?: return null
            val bytes = character.toByteArray(Charsets.UTF_8)
            return IntArray(bytes.size) { byteTokens[bytes[it].toInt() and 0xFF] }.takeIf { NONE !in it }
        }

        fun merged(ids: IntList) {
            // Rank above, place below: the earliest merge first, the leftmost of equals.
            val queue = PriorityQueue<Long>()
            fun offer(place: Int) {
                if (place == NONE || next[place] == NONE) return
                val merge = merge(tokens[place], tokens[next[place]])
                if (merge >= 0) queue.add(ranks[merge].toLong() shl 32 or place.toLong())
            }
            for (place in 0 until count - 1) offer(place)
            while (true) {
                val top = queue.poll() ?: break
                val place = top.toInt()
                val second = next[place]
                if (tokens[place] == NONE || second == NONE) continue
                val merge = merge(tokens[place], tokens[second])
                // The pair may have changed since it was offered.
                if (merge < 0 || ranks[merge] != (top shr 32).toInt()) continue
                tokens[place] = results[merge]
                tokens[second] = NONE
                next[place] = next[second]
                if (next[place] != NONE) previous[next[place]] = place
                offer(previous[place])
                offer(place)
            }
            var place = 0
            while (place != NONE && count > 0) {
                ids.add(tokens[place])
                place = next[place]
            }
        }
    }

    private companion object {
        const val NONE = -1
    }
}
