package dev.lesonnx.vision

import ai.onnxruntime.OnnxJavaType.FLOAT
import ai.onnxruntime.OnnxJavaType.INT64
import ai.onnxruntime.OnnxJavaType.UINT8
import ai.onnxruntime.OrtSession
import dev.lesonnx.Binding
import dev.lesonnx.Bundle
import dev.lesonnx.Ort
import dev.lesonnx.PartRole
import dev.lesonnx.Platform
import dev.lesonnx.Tensor
import dev.lesonnx.TensorArena
import dev.lesonnx.VisionRecord
import java.nio.file.Files

/**
 * What makes image features of pictures: the bundle's two vision parts as sessions, open from here to [close].
 *
 * It knows pixels, not prompts. Open it while pictures are read only: the weights count until it is closed. Not thread-safe; owns its
 * sessions. BundleError for a part that ONNX Runtime does not take.
 */
internal class Eyes(bundle: Bundle, private val vision: VisionRecord, private val platform: Platform, numThreads: Int) : AutoCloseable {
    private val hiddenSize = bundle.manifest.model.hiddenSize
    private val sessions = HashMap<PartRole, OrtSession>()

    init {
        try {
            Ort.sessionOptions(optimise = true, numThreads).use { options ->
                for (part in vision.parts) sessions[part.role] = Ort.openSession(bundle.partFile(part), options)
            }
        } catch (error: Throwable) {
            close()
            throw error
        }
    }

    /**
     * The features [I,H] of a picture: the overview's image tokens, then its slices'. [beforeCrop] is called before each crop is read; what
     * it throws ends the work.
     */
    fun see(picture: Picture, views: List<View>, beforeCrop: () -> Unit = {}): FloatArray {
        val features = FloatArray(Math.multiplyExact(views.sumOf { it.numTokens(vision) }, hiddenSize))
        var filled = 0
        prepare(picture, views).use { prepared ->
            for ((place, view) in views.withIndex()) {
                for (crop in 0 until view.numCrops) {
                    beforeCrop()
                    filled += read(prepared[place], view, crop, features, filled)
                }
            }
        }
        return features
    }

    /** The packed pixels [1,3,P,W] of every view of a picture, by the views' places; the caller closes them. */
    fun prepare(picture: Picture, views: List<View>): TensorArena {
        val prepared = TensorArena(platform)
        for (view in views) {
            val patches = (view.height / vision.patchSize).toLong() * (view.width / vision.patchSize)
            prepared.plan(FLOAT, 1, Picture.CHANNELS.toLong(), vision.patchSize.toLong(), patches * vision.patchSize)
        }
        try {
            prepared.allocate()
            TensorArena(platform).use { arena ->
                val imageAt = arena.plan(UINT8, picture.height.toLong(), picture.width.toLong(), Picture.CHANNELS.toLong())
                val sizeAt = arena.plan(INT64, 2)
                val gridAt = arena.plan(INT64, 2)
                arena.allocate()
                arena[imageAt].bytes.duplicate().put(picture.pixels)
                for ((place, view) in views.withIndex()) {
                    arena[sizeAt].longs.put(0, view.height.toLong()).put(1, view.width.toLong())
                    arena[gridAt].longs.put(0, view.rows.toLong()).put(1, view.columns.toLong())
                    val inputs = mapOf("image" to arena[imageAt], "size" to arena[sizeAt], "grid" to arena[gridAt])
                    run(PartRole.VISION_PREPARE, inputs, mapOf("pixel_values" to prepared[place]))
                }
            }
        } catch (error: Throwable) {
            prepared.close()
            throw error
        }
        return prepared
    }

    /** Reads one crop into [features] from value [from] on; gives how many values that were. */
    private fun read(pixels: Tensor, view: View, crop: Int, features: FloatArray, from: Int): Int {
        val patchRows = view.cropHeight / vision.patchSize
        val patchColumns = view.cropWidth / vision.patchSize
        val width = patchRows * patchColumns * vision.patchSize
        val lines = Picture.CHANNELS * vision.patchSize
        val numTokens = view.cropTokens(vision)
        TensorArena(platform).use { arena ->
            val cropAt = arena.plan(FLOAT, 1, Picture.CHANNELS.toLong(), vision.patchSize.toLong(), width.toLong())
            val sizeAt = arena.plan(INT64, 2)
            val featuresAt = arena.plan(FLOAT, numTokens.toLong(), hiddenSize.toLong())
            arena.allocate()
            // A crop lies in a stretch of every line.
            for (line in 0 until lines) {
                val begin = (line * view.numCrops + crop) * width
                arena[cropAt].floats.duplicate().position(line * width).put(pixels.floats.duplicate().limit(begin + width).position(begin))
            }
            arena[sizeAt].longs.put(0, patchRows.toLong()).put(1, patchColumns.toLong())
            run(
                PartRole.VISION_TOWER,
                mapOf("pixel_values" to arena[cropAt], "target_size" to arena[sizeAt]),
                mapOf("image_features" to arena[featuresAt]),
            )
            arena[featuresAt].floats.duplicate().position(0).get(features, from, numTokens * hiddenSize)
        }
        return numTokens * hiddenSize
    }

    private fun run(role: PartRole, inputs: Map<String, Tensor>, outputs: Map<String, Tensor>) =
        Binding(sessions.getValue(role), inputs.mapValues { it.value.onnx }, outputs.mapValues { it.value.onnx }).run()

    override fun close() {
        sessions.values.forEach(OrtSession::close)
        sessions.clear()
    }

    companion object {
        /** What preparing takes of memory for a pixel of the picture, its own three bytes among it. */
        private const val PREPARING_BYTES = 27L

        /** What reading a picture takes, outside the heap: the tower's weights, packed pixels, and the picture, or then a crop. */
        fun readingBytes(bundle: Bundle, vision: VisionRecord, picture: Picture, views: List<View>): Long {
            val weights = Files.size(bundle.file(vision.data))
            val packed = views.sumOf { Picture.CHANNELS * Float.SIZE_BYTES * it.height.toLong() * it.width }
            return weights + packed + maxOf(PREPARING_BYTES * picture.height * picture.width, vision.workingBytes)
        }
    }
}
