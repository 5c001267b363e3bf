package dev.lesonnx.vision

import dev.lesonnx.Bundle
import dev.lesonnx.Platform
import dev.lesonnx.PromptPicture
import dev.lesonnx.VisionRecord

/** Runs a block while the process has room for so many bytes more; see [dev.lesonnx.Runner.borrow]. */
internal fun interface Borrow {
    fun during(numBytes: Long, block: () -> Unit)
}

/**
 * The features of pictures: read once, and kept while there is room, so that a conversation's earlier pictures are not read anew.
 *
 * Eyes are open only while it reads. It knows pictures by their keys, not prompts. Not thread-safe.
 */
internal class Sight(
    private val bundle: Bundle,
    private val vision: VisionRecord,
    private val platform: Platform,
    private val numThreads: Int,
    private val mostKept: Int = KEPT_VALUES,
    private val borrow: Borrow,
) {
    /** What reading has taken in all, in nanoseconds. */
    var readNs = 0L
        private set

    // By the pictures' keys, the one that was wanted longest ago first.
    private val kept = LinkedHashMap<String, FloatArray>(16, 0.75f, true)

    /**
     * The features [I,H] of pictures. [beforeCrop] is called before each crop is read; what it throws ends the work, and what was read is
     * kept. BudgetError where the process has no room for it.
     */
    fun see(pictures: List<PromptPicture>, beforeCrop: () -> Unit): Map<PromptPicture, FloatArray> {
        val features = HashMap<PromptPicture, FloatArray>()
        val unread = ArrayList<PromptPicture>()
        for (seen in pictures) kept[seen.picture.key]?.let { features[seen] = it } ?: unread.add(seen)
        if (unread.isEmpty()) return features
        val began = System.nanoTime()
        try {
            val numBytes = unread.maxOf { Eyes.readingBytes(bundle, vision, it.picture, it.views) }
            borrow.during(numBytes) { Eyes(bundle, vision, platform, numThreads).use { read(it, unread, features, beforeCrop) } }
        } finally {
            readNs += System.nanoTime() - began
        }
        return features
    }

    private fun read(eyes: Eyes, pictures: List<PromptPicture>, features: MutableMap<PromptPicture, FloatArray>, beforeCrop: () -> Unit) {
        // A prompt may show a picture twice.
        val read = HashMap<String, FloatArray>()
        for (seen in pictures) {
            val key = seen.picture.key
            features[seen] = read.getOrPut(key) { eyes.see(seen.picture, seen.views, beforeCrop).also { keep(key, it) } }
        }
    }

    private fun keep(key: String, features: FloatArray) {
        kept[key] = features
        val eldest = kept.values.iterator()
        var numValues = kept.values.sumOf { it.size.toLong() }
        while (numValues > mostKept) {
            numValues -= eldest.next().size
            eldest.remove()
        }
    }

    private companion object {
        /** 16 MiB: at a hidden size of 2048 three pictures of ten crops, or thirty small ones. */
        const val KEPT_VALUES = (16 shl 20) / Float.SIZE_BYTES
    }
}
