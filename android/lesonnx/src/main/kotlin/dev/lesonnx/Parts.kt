package dev.lesonnx

import kotlinx.serialization.EncodeDefault
import kotlinx.serialization.ExperimentalSerializationApi
import kotlinx.serialization.KSerializer
import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable
import kotlinx.serialization.SerializationException
import kotlinx.serialization.descriptors.PrimitiveKind
import kotlinx.serialization.descriptors.PrimitiveSerialDescriptor
import kotlinx.serialization.descriptors.SerialDescriptor
import kotlinx.serialization.encoding.Decoder
import kotlinx.serialization.encoding.Encoder
import kotlinx.serialization.json.JsonDecoder
import kotlinx.serialization.json.JsonEncoder
import kotlinx.serialization.json.JsonPrimitive
import kotlinx.serialization.json.longOrNull

/** What a dense part does in the forward pass. */
@Serializable
enum class PartRole {
    @SerialName("embed")
    EMBED,

    @SerialName("segment")
    SEGMENT,

    @SerialName("mixer")
    MIXER,

    @SerialName("head")
    HEAD,

    @SerialName("lookahead")
    LOOKAHEAD,

    @SerialName("replay")
    REPLAY,

    @SerialName("drafter_context")
    DRAFTER_CONTEXT,

    @SerialName("drafter_block")
    DRAFTER_BLOCK,

    @SerialName("drafter_markov")
    DRAFTER_MARKOV,

    @SerialName("vision_prepare")
    VISION_PREPARE,

    @SerialName("vision_tower")
    VISION_TOWER,
}

/** A dense ONNX model of the bundle. [providers]: execution providers by target, in order of preference. */
@Serializable
data class Part(
    val name: String,
    val role: PartRole,
    val path: String,
    @SerialName("layer_idx") val layerIdx: Int? = null,
    val inputs: List<Value>,
    val outputs: List<Value>,
    val providers: Map<Target, List<Provider>> = emptyMap(),
)

/**
 * A tensor that a part takes or gives. Symbolic dimensions: T tokens of the step, R logit rows, S capacity, P tokens in a drafter's caches,
 * Y and X height and width of a picture, W columns of packed patches, I image tokens.
 */
@Serializable
data class Value(val name: String, val dtype: Dtype, val shape: List<Dimension>)

/** An execution provider and its options, as ONNX Runtime names them. */
@Serializable
data class Provider(val name: String, val options: Map<String, String> = emptyMap())

/** Where a bundle runs. */
@Serializable
enum class Target {
    @SerialName("desktop")
    DESKTOP,

    @SerialName("android")
    ANDROID,

    @SerialName("ios")
    IOS,
}

/** The type of a tensor's elements. */
@Serializable
enum class Dtype {
    @SerialName("float32")
    FLOAT32,

    @SerialName("float16")
    FLOAT16,

    @SerialName("int64")
    INT64,

    @SerialName("int32")
    INT32,

    @SerialName("bool")
    BOOL,

    @SerialName("uint8")
    UINT8,

    @SerialName("int8")
    INT8,
}

/** A dimension of a shape: a number, or the letter of one. */
@Serializable(with = DimensionSerializer::class)
sealed interface Dimension {
    data class Fixed(val size: Long) : Dimension {
        override fun toString(): String = size.toString()
    }

    data class Symbol(val letter: String) : Dimension {
        override fun toString(): String = "'$letter'"
    }
}

internal object DimensionSerializer : KSerializer<Dimension> {
    override val descriptor: SerialDescriptor = PrimitiveSerialDescriptor("dev.lesonnx.Dimension", PrimitiveKind.STRING)

    override fun deserialize(decoder: Decoder): Dimension {
        val json = decoder as? JsonDecoder ?: throw SerializationException("a dimension is read from JSON only")
        val element = json.decodeJsonElement()
        if (element is JsonPrimitive) {
            if (element.isString) return Dimension.Symbol(element.content)
            element.longOrNull?.let { return Dimension.Fixed(it) }
        }
        throw SerializationException("dimension $element of a shape is neither a whole number nor a letter")
    }

    override fun serialize(encoder: Encoder, value: Dimension) {
        val json = encoder as? JsonEncoder ?: throw SerializationException("a dimension is written as JSON only")
        when (value) {
            is Dimension.Fixed -> json.encodeJsonElement(JsonPrimitive(value.size))
            is Dimension.Symbol -> json.encodeJsonElement(JsonPrimitive(value.letter))
        }
    }
}

/** What a state holds. */
@Serializable
enum class StateKind {
    @SerialName("attention_key")
    ATTENTION_KEY,

    @SerialName("attention_value")
    ATTENTION_VALUE,

    @SerialName("convolution")
    CONVOLUTION,

    @SerialName("recurrent")
    RECURRENT,
}

/**
 * How a state of fixed shape goes back to a token inside the last step.
 *
 * [part], of role `replay`, takes `past` (the state before the step) and some of the step's rows, and gives `present`, the
 * state after them. [rows] names, for each of its other inputs, the output [1, T, n] of the state's own part that holds a
 * step's rows.
 */
@Serializable
data class Replay(val part: String, val rows: Map<String, String>)

/**
 * A tensor that a part carries from step to step: [input] and [output] of [part], zero at the start.
 *
 * Attention states are [1, kv heads, S, head size]; past and present are one buffer of the host's, of any capacity S that
 * holds the tokens so far and those of the step. Convolution and recurrent states have a fixed shape, past and present are
 * two buffers, and [replay] says how to go back into a step.
 */
@OptIn(ExperimentalSerializationApi::class)
@Serializable
data class State(
    val name: String,
    val kind: StateKind,
    @SerialName("layer_idx") val layerIdx: Int,
    val part: String,
    val input: String,
    val output: String,
    val dtype: Dtype,
    val shape: List<Dimension>,
    @EncodeDefault(EncodeDefault.Mode.NEVER) val replay: Replay? = null,
) {
    val isAttention: Boolean get() = kind == StateKind.ATTENTION_KEY || kind == StateKind.ATTENTION_VALUE

    /** The outputs of the state's part that a replay takes. */
    val rowNames: List<String> get() = replay?.rows?.values?.toList().orEmpty()
}
