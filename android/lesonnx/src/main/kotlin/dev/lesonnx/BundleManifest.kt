package dev.lesonnx

import kotlinx.serialization.EncodeDefault
import kotlinx.serialization.ExperimentalSerializationApi
import kotlinx.serialization.MissingFieldException
import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable
import kotlinx.serialization.SerializationException
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.JsonPrimitive
import kotlinx.serialization.json.longOrNull

internal const val FORMAT_VERSION = 1L

/** The positions of a token of a model that takes pictures: time, height, width. */
internal const val PICTURE_ROWS = 3

/**
 * The whole of a bundle's `manifest.json`, as `docs/bundle.md` defines it; immutable, safe to share. [parse] is how to get
 * one: it checks all that a host relies on.
 */
@OptIn(ExperimentalSerializationApi::class)
@Serializable
data class BundleManifest(
    @SerialName("format_version") val formatVersion: Long = FORMAT_VERSION,
    val producer: String,
    @SerialName("onnxruntime_at_least") val onnxruntimeAtLeast: String,
    val model: ModelFacts,
    val quantization: Quantization,
    @SerialName("prefill_chunk_tokens") val prefillChunkTokens: Long = 512,
    val parts: List<Part>,
    val states: List<State>,
    @SerialName("expert_kinds") val expertKinds: List<ExpertKind>,
    @SerialName("expert_layers") val expertLayers: List<ExpertLayer>,
    val tokenizer: TokenizerFiles? = null,
    @EncodeDefault(EncodeDefault.Mode.NEVER) val drafter: DrafterRecord? = null,
    @EncodeDefault(EncodeDefault.Mode.NEVER) val twins: TwinsRecord? = null,
    @EncodeDefault(EncodeDefault.Mode.NEVER) val vision: VisionRecord? = null,
    @SerialName("skipped_tensors") val skippedTensors: Map<String, String> = emptyMap(),
) {
    /** The part of a role (and layer); NoSuchElementException where there is none. */
    fun part(role: PartRole, layerIdx: Int? = null): Part =
        parts.first { it.role == role && (layerIdx == null || it.layerIdx == layerIdx) }

    /** Every dense part that stays open: those of the forward pass and of replays, and the drafter's own. */
    val allParts: List<Part> get() = parts + drafter?.parts.orEmpty()

    /** How many positions a token has: 3 (time, height, width) where pictures lie on a canvas, else 1. */
    val positionRows: Int
        get() = if (parts.any { part -> part.inputs.any { it.name == "position_ids" && it.shape.size == 3 } }) PICTURE_ROWS else 1

    /** The bits that matrices of experts have, ascending: one number where all are alike. */
    val expertBits: List<Int>
        get() = expertLayers.flatMap { listOfNotNull(it.kind, it.sharedKind) }.distinct()
            .flatMap { kind -> expertKinds[kind].matrices.values.map { it.bits } }.distinct().sorted()

    /** The values of a token in what segments hand on as `residual`: the hidden size, in Gemma 4 twice that. */
    val residualSize: Long
        get() = parts.asSequence().flatMap { it.outputs }.filter { it.name == "residual_out" }
            .firstNotNullOfOrNull { (it.shape.lastOrNull() as? Dimension.Fixed)?.size } ?: model.hiddenSize.toLong()

    companion object {
        /** The manifest in a JSON text. Unknown keys are errors. BundleError, in one line that names the field. */
        fun parse(text: String, source: String = "manifest.json"): BundleManifest {
            val document = try {
                Json.parseToJsonElement(text)
            } catch (error: SerializationException) {
                throw BundleError("$source: not JSON: ${firstLine(error)}")
            } catch (_: StackOverflowError) {
                throw BundleError("$source: not JSON that a manifest could be: nested too deeply")
            }
            val version = ((document as? JsonObject)?.get("format_version") as? JsonPrimitive)
                ?.takeIf { !it.isString }?.longOrNull
            if (version != null && version != FORMAT_VERSION) {
                throw BundleError(
                    "$source: format_version is $version, this lesonnx reads $FORMAT_VERSION; export again",
                )
            }
            val manifest = decode(text, source)
            val problem = ManifestCheck(manifest).firstProblem()
            if (problem != null) throw BundleError("$source: $problem")
            return manifest
        }

        @OptIn(ExperimentalSerializationApi::class)
        private fun decode(text: String, source: String): BundleManifest = try {
            Json.decodeFromString<BundleManifest>(text)
        } catch (error: MissingFieldException) {
            throw BundleError("$source: ${place(error)}${error.missingFields.first()}: required, but missing")
        } catch (error: SerializationException) {
            val field = place(error).removeSuffix(".").ifEmpty { "document" }
            throw BundleError("$source: $field: ${firstLine(error)}")
        }

        // The library says where in its messages only: "... at path: $.parts[0]", "... at element: $.parts[0]".
        private val PATH = Regex(" at (?:path|element):? '?\\$([^\\s']*)'?")

        /** Where an error was met: `expert_layers.0.`, empty for the document itself. */
        private fun place(error: Throwable): String {
            val path = PATH.find(error.message.orEmpty())?.groupValues?.get(1).orEmpty()
            return path.replace("[", ".").replace("]", "").removePrefix(".").let { if (it.isEmpty()) it else "$it." }
        }

        private val OFFSET = Regex("^Unexpected JSON token at offset [0-9]+: ")

        private fun firstLine(error: Throwable): String =
            oneLine(error.message.orEmpty().lineSequence().first().replace(PATH, "").replace(OFFSET, ""))
    }
}

/** What a host must know of the model; names as Hugging Face spells them. */
@Serializable
data class ModelFacts(
    @SerialName("model_type") val modelType: String,
    @SerialName("hidden_size") val hiddenSize: Int,
    @SerialName("num_hidden_layers") val numHiddenLayers: Int,
    @SerialName("vocab_size") val vocabSize: Int,
    @SerialName("num_experts") val numExperts: Int,
    @SerialName("num_experts_per_tok") val numExpertsPerTok: Int,
    @SerialName("moe_intermediate_size") val moeIntermediateSize: Int,
    @SerialName("max_position_embeddings") val maxPositionEmbeddings: Int,
    @SerialName("num_parameters") val numParameters: Long,
    @SerialName("num_active_parameters") val numActiveParameters: Long,
    @SerialName("eos_token_ids") val eosTokenIds: List<Int> = emptyList(),
    @SerialName("bos_token_id") val bosTokenId: Int? = null,
    @SerialName("pad_token_id") val padTokenId: Int? = null,
)

/**
 * How the weights are stored: bits and block sizes of experts and dense parts. Experts may differ from [expertBits] and
 * [blockSize], layer by layer and matrix by matrix: their kinds say how ([BundleManifest.expertBits]).
 */
@OptIn(ExperimentalSerializationApi::class)
@Serializable
data class Quantization(
    @SerialName("expert_bits") val expertBits: Int,
    @SerialName("dense_bits") val denseBits: Int,
    @SerialName("kv_bits") val kvBits: Int = 32,
    @SerialName("block_size") val blockSize: Int,
    @EncodeDefault(EncodeDefault.Mode.NEVER) val calibration: Calibration? = null,
)

/**
 * How experts were quantized for what they do on a text: its digest (null where random tokens had to do) and the tokens of
 * it that were run. With a [targetSize], bits and blocks were chosen layer by layer for experts of at most that share of
 * [baselineBytes].
 */
@Serializable
data class Calibration(
    @SerialName("text_sha256") val textSha256: String?,
    @SerialName("num_tokens") val numTokens: Long,
    @SerialName("target_size") val targetSize: Double? = null,
    @SerialName("baseline_bytes") val baselineBytes: Long,
    val layers: List<CalibratedLayer>,
)

/** What rounding the experts of a MoE layer is expected to cost: nats of KL a token. */
@Serializable
data class CalibratedLayer(
    @SerialName("layer_idx") val layerIdx: Int,
    @SerialName("expected_loss") val expectedLoss: Double,
)

/** Where the tokenizer lies, and how a conversation becomes text; null for what the bundle lacks. */
@Serializable
data class TokenizerFiles(
    @SerialName("json_path") val jsonPath: String? = null,
    val onnx: String? = null,
    val config: String? = null,
    @SerialName("chat_template") val chatTemplate: String? = null,
    @SerialName("chat_format") val chatFormat: ChatFormat? = null,
)
