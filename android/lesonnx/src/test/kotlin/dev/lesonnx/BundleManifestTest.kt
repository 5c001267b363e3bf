package dev.lesonnx

import java.nio.file.Files
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertFalse
import kotlin.test.assertTrue
import kotlinx.serialization.encodeToString
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonArray
import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonNull
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.JsonPrimitive
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import org.junit.jupiter.api.Test

/** The manifest: unknown keys and other versions are refused, references must hold; each error is one line. */
internal class BundleManifestTest {
    private val text = Files.readString(TestData.mobile.resolve("bundles/qwen2_moe-int4/manifest.json"))
    private val document = Json.parseToJsonElement(text)

    /** The element with another value at a path of keys and places. */
    private fun JsonElement.with(path: List<Any>, value: JsonElement?): JsonElement {
        if (path.isEmpty()) return value!!
        val key = path.first()
        if (key is Int) {
            val items = jsonArray.toMutableList()
            val place = if (key < 0) items.size + key else key
            items[place] = items[place].with(path.drop(1), value)
            return JsonArray(items)
        }
        key as String
        if (path.size == 1 && value == null) return JsonObject(jsonObject - key)
        return JsonObject(jsonObject + (key to jsonObject.getOrDefault(key, JsonNull).with(path.drop(1), value)))
    }

    private fun problem(text: String): String {
        val error = assertFailsWith<BundleError> { BundleManifest.parse(text, "here/manifest.json") }
        val message = error.message!!
        assertTrue(message.startsWith("here/manifest.json: "), message)
        assertFalse('\n' in message, message)
        assertTrue(message.length < 400, message)
        return message.removePrefix("here/manifest.json: ")
    }

    private fun problem(value: JsonElement?, vararg path: Any): String =
        problem(document.with(path.toList(), value).toString())

    private fun problem(value: String, vararg path: Any) = problem(JsonPrimitive(value), *path)

    private fun problem(value: Number, vararg path: Any) = problem(JsonPrimitive(value), *path)

    @Test
    fun `every bundle's manifest survives a round trip`() {
        val bundles = Files.newDirectoryStream(TestData.mobile.resolve("bundles")).use { it.toList() }
        assertTrue(bundles.size >= Reference.BUNDLES.size)
        for (bundle in bundles) {
            val manifest = BundleManifest.parse(Files.readString(bundle.resolve("manifest.json")))
            val json = Json { encodeDefaults = true }
            assertEquals(manifest, BundleManifest.parse(json.encodeToString(manifest)))
            val written = json.parseToJsonElement(json.encodeToString(manifest)).jsonObject
            val original = json.parseToJsonElement(Files.readString(bundle.resolve("manifest.json"))).jsonObject
            for (key in original.keys - "tokenizer" - "quantization") assertEquals(original[key], written[key], "$bundle $key")
            // Losses are numbers that are spelled in several ways, so their record is compared as read, above.
            val (plain, again) = listOf(original, written).map { it["quantization"]!!.jsonObject - "calibration" }
            assertEquals(plain, again, "$bundle quantization")
        }
    }

    @Test
    fun `parts by role`() {
        val manifest = BundleManifest.parse(text)
        assertEquals("embed", manifest.part(PartRole.EMBED).name)
        assertEquals("segment_002", manifest.part(PartRole.SEGMENT, 2).name)
        assertFailsWith<NoSuchElementException> { manifest.part(PartRole.LOOKAHEAD, 0) }
    }

    private fun assertSays(expected: String, message: String) = assertTrue(expected in message, "'$expected' in '$message'")

    @Test
    fun `keys and types`() {
        assertSays("document: ", problem(1, "colour"))
        assertSays("colour", problem(1, "colour"))
        assertSays("expert_layers.0: Encountered an unknown key", problem(1, "expert_layers", 0, "colour"))
        assertSays("colour", problem(1, "expert_layers", 0, "colour"))
        assertSays("model.hidden_size: required, but missing", problem(null as JsonElement?, "model", "hidden_size"))
        assertSays("producer: required, but missing", problem(null as JsonElement?, "producer"))
        assertSays("parts.1.inputs.0.dtype: required, but missing", problem(null as JsonElement?, "parts", 1, "inputs", 0, "dtype"))
        assertSays("model.num_experts", problem("many", "model", "num_experts"))
        assertSays("model.hidden_size", problem(1.5, "model", "hidden_size"))
        assertSays("model.hidden_size: -1, expected 1 to", problem(-1, "model", "hidden_size"))
        assertSays("model.hidden_size", problem(1L shl 40, "model", "hidden_size"))
        assertSays("parts.0.role", problem("middle", "parts", 0, "role"))
        assertSays("dimension true of a shape", problem(JsonPrimitive(true), "parts", 0, "inputs", 0, "shape", 0))
        assertSays("quantization.expert_bits: 5, expected one of 2, 4, 8, 32", problem(5, "quantization", "expert_bits"))
        assertSays("onnxruntime_at_least: 'new' is not a version", problem("new", "onnxruntime_at_least"))
        assertSays("expert_layers: empty", problem(JsonArray(emptyList()), "expert_layers"))
    }

    @Test
    fun `the record of a calibration`() {
        val record = """{"text_sha256": "${"0f".repeat(32)}", "num_tokens": 512, "target_size": 0.733, "baseline_bytes": 4096,
            "layers": [{"layer_idx": 0, "expected_loss": 1.5e-05}, {"layer_idx": 1, "expected_loss": 0}, {"layer_idx": 2, "expected_loss": 1}]}"""
        fun calibrated(record: String) =
            document.with(listOf("quantization", "calibration"), Json.parseToJsonElement(record)).toString()
        assertEquals(null, BundleManifest.parse(text).quantization.calibration)
        assertEquals(listOf(4), BundleManifest.parse(text).expertBits)
        val calibration = BundleManifest.parse(calibrated(record)).quantization.calibration!!
        assertEquals(0.733, calibration.targetSize)
        assertEquals(listOf(1.5e-05, 0.0, 1.0), calibration.layers.map { it.expectedLoss })
        for ((old, new, message) in listOf(
            Triple("0f0f", "xy", "calibration.text_sha256: 'xy0f"),
            Triple("\"num_tokens\": 512", "\"num_tokens\": 0", "calibration.num_tokens"),
            Triple("0.733", "-1", "calibration.target_size: -1.0, expected more than 0"),
            Triple("1.5e-05", "-1", "calibration.layers: layer 0 is expected to lose -1.0"),
            Triple("\"layer_idx\": 1", "\"layer_idx\": 3", "calibration.layers: not the layers of expert_layers"),
            Triple("\"baseline_bytes\"", "\"bytes\"", "calibration"),
        )) assertSays(message, problem(calibrated(record.replaceFirst(old, new))))
    }

    @Test
    fun versions() {
        assertSays("format_version is 2, this lesonnx reads 1; export again", problem(2, "format_version"))
        assertSays("format_version is 0", problem(0, "format_version"))
        assertSays("format_version", problem(JsonNull, "format_version"))
    }

    @Test
    fun `twins fit the parts that they stand for`() {
        val whole = Json.parseToJsonElement(Files.readString(TestData.mobile.resolve("bundles/qwen3_moe-twins-ios-float/manifest.json")))
        fun says(expected: String, value: JsonElement?, vararg path: Any) =
            assertSays(expected, problem(whole.with(listOf("twins") + path, value).toString()))
        says("twins.float_bits: 8, expected one of 16, 32", JsonPrimitive(8), "float_bits")
        says("twins.exact_over_widths: true, expected false", JsonPrimitive(true), "exact_over_widths")
        says("twins.path '../x' must be relative", JsonPrimitive("../x"), "data")
        says("twins: 'embed' with", JsonPrimitive("embed"), "parts", 0, "part")
        says("twins: every segment needs its selection", JsonArray(emptyList()), "selections")
        says("twins: positions takes 'colour', which no host has for it", JsonPrimitive("colour"), "positions", "inputs", 0, "name")
        says("is not fixed", JsonPrimitive("T"), "parts", 0, "inputs", 0, "shape", 1)
        says("expected float32 [1, 99, 64]", JsonPrimitive(99), "parts", 0, "rows")
        says("twins: the selection of 'segment_", JsonPrimitive("colour"), "selections", 0, "inputs", 0, "name")
    }

    @Test
    fun `a drafter fits its model`() {
        val whole = Json.parseToJsonElement(Files.readString(TestData.mobile.resolve("bundles/sample-dspark-int4/manifest.json")))
        val parts = whole.jsonObject.getValue("drafter").jsonObject.getValue("parts").jsonArray
        val at = parts.map { it.jsonObject.getValue("role").toString().trim('"') }
        fun says(expected: String, value: JsonElement?, vararg path: Any) =
            assertSays(expected, problem(whole.with(listOf("drafter") + path, value).toString()))
        says("drafter.block_size: 0, expected 1 to 256", JsonPrimitive(0), "block_size")
        says("drafter.kind", JsonPrimitive("medusa"), "kind")
        says("drafter.target_layer_ids: empty", JsonArray(emptyList()), "target_layer_ids")
        says("drafter.parts.0.path: path '../x' must be relative", JsonPrimitive("../x"), "parts", 0, "path")
        says("drafter: mask_token_id is 2048, expected less than 2048", JsonPrimitive(2048), "mask_token_id")
        says("names layer 77, whose output no part gives", JsonPrimitive(77), "target_layer_ids", 0)
        says("drafter: target_layer_ids names a layer twice", JsonPrimitive(2), "target_layer_ids", 0)
        says("the drafter has exactly one part of each role: drafter_context, drafter_block, drafter_markov", JsonArray(parts.drop(1)), "parts")
        says("part '", JsonPrimitive("colour"), "parts", at.indexOf("drafter_markov"), "inputs", 0, "name")
        says("expected int64 [1, 'T']", JsonPrimitive("float32"), "parts", at.indexOf("drafter_context"), "inputs", 1, "dtype")
        says("is not [1, 'T', size]", JsonPrimitive("T"), "parts", at.indexOf("drafter_context"), "outputs", 0, "shape", 2)
    }

    @Test
    fun `what takes pictures fits its model`() {
        val whole = Json.parseToJsonElement(Files.readString(Reference.bundle("minicpmv4_7-float").resolve("manifest.json")))
        val manifest = BundleManifest.parse(whole.toString())
        assertEquals(3, manifest.positionRows)
        assertEquals(1, BundleManifest.parse(text).positionRows)
        val parts = whole.jsonObject.getValue("vision").jsonObject.getValue("parts").jsonArray
        val tower = parts.indexOfFirst { it.jsonObject["role"] == JsonPrimitive("vision_tower") }
        fun says(expected: String, value: JsonElement?, vararg path: Any) = assertSays(expected, problem(whole.with(listOf("vision") + path, value).toString()))
        says("vision.kind", JsonPrimitive("qwen3_vl"), "kind")
        says("vision: Encountered an unknown key 'colour'", JsonPrimitive(1), "colour")
        says("vision.texts: Encountered an unknown key 'colour'", JsonPrimitive(1), "texts", "colour")
        says("vision.patch_size: 0, expected 1 to 1024", JsonPrimitive(0), "patch_size")
        says("vision.max_slice_nums: -1, expected 1 to 256", JsonPrimitive(-1), "max_slice_nums")
        says("vision.max_slice_nums: 257, expected 1 to 256", JsonPrimitive(257), "max_slice_nums")
        says("vision.scale_resolution: 8193, expected 1 to 8192", JsonPrimitive(8193), "scale_resolution")
        says("vision.working_bytes: 0, expected 1 to", JsonPrimitive(0), "working_bytes")
        says("vision.token_patches: 3, expected 2 or 4", JsonPrimitive(3), "token_patches")
        says("vision.data: path '../x' must be relative", JsonPrimitive("../x"), "data")
        says("vision.parts.0.path: path '../x' must be relative", JsonPrimitive("../x"), "parts", 0, "path")
        says("vision.tokens.image: -1, expected at least 0", JsonPrimitive(-1), "tokens", "image")
        says("vision: tokens.newline is 384, expected less than 384", JsonPrimitive(384), "tokens", "newline")
        says("vision.texts.placeholder: empty", JsonPrimitive(""), "texts", "placeholder")
        says("vision: texts has one of id_start and id_end, expected both or none", JsonNull, "texts", "id_end")
        says("vision has exactly one part of each role: vision_prepare, vision_tower", JsonArray(parts.drop(1)), "parts")
        says("vision: part 'vision_tower' takes colour", JsonPrimitive("colour"), "parts", tower, "inputs", 0, "name")
        says("expected image_features float32 ['I', 64]", JsonPrimitive(65), "parts", tower, "outputs", 0, "shape", 1)
        val rows = (whole.with(listOf("parts"), JsonArray(whole.jsonObject.getValue("parts").jsonArray.map(::withOneRow))))
        assertSays("vision: the model's parts take position_ids [1, T], expected [3, 1, T]", problem(rows.toString()))
        val mixed = whole.jsonObject.getValue("parts").jsonArray.let { all ->
            val place = all.indexOfFirst { withOneRow(it) != it }
            JsonArray(all.mapIndexed { at, part -> if (at == place) withOneRow(part) else part })
        }
        assertSays("position_ids", problem(whole.with(listOf("parts"), mixed).toString()))
        assertEquals(listOf<Part>(), manifest.allParts.filter { it.role == PartRole.VISION_TOWER })
    }

    /** A part that takes the positions of a text. */
    private fun withOneRow(part: JsonElement): JsonElement {
        val inputs = part.jsonObject.getValue("inputs").jsonArray
        val place = inputs.indexOfFirst { it.jsonObject["name"] == JsonPrimitive("position_ids") }
        return if (place < 0) part else part.with(listOf("inputs", place, "shape"), Json.parseToJsonElement("""[1, "T"]"""))
    }

    @Test
    fun `paths stay inside`() {
        val paths = listOf("../embed.onnx", "/tmp/x.pack", "C:x.pack", "a\\b", "", "a/../../b", "a\u0000b")
        for (path in paths) {
            assertSays("parts.0.path: path '$path' must be relative", problem(path, "parts", 0, "path"))
            assertSays("expert_layers.0.pack", problem(path, "expert_layers", 0, "pack"))
            assertSays("expert_kinds.0.stage", problem(path, "expert_kinds", 0, "stage"))
            val files = JsonObject(mapOf("json_path" to JsonPrimitive(path)))
            assertSays("tokenizer.json_path", problem(files, "tokenizer"))
        }
    }

    @Test
    fun references() {
        assertSays("names part 'segment_9', which is not there", problem("segment_9", "states", 0, "part"))
        assertSays("is not [1, heads, 'S', size]", problem(7, "states", 0, "shape", 2))
        assertSays("two parts have one name", problem("embed", "parts", 1, "name"))
        assertSays("exactly one head part", problem("lookahead", "parts", -1, "role"))
        assertSays("every MoE layer needs its segment", problem(7, "parts", 1, "layer_idx"))
        assertSays("names expert kind 9 of 2", problem(9, "expert_layers", 1, "kind"))
        assertSays("num_experts_per_tok is 99, the model's is", problem(99, "expert_layers", 0, "num_experts_per_tok"))
        assertSays("experts a token of", problem(1, "model", "num_experts"))
    }

    private fun manifestOf(bundle: String) = Json.parseToJsonElement(Files.readString(Reference.bundle(bundle).resolve("manifest.json")))

    @Test
    fun `states and their replays`() {
        val recurrent = manifestOf("qwen3_next-float")
        val states = recurrent.jsonObject.getValue("states").jsonArray.map { it.jsonObject }
        val place = states.indexOfFirst { it["kind"] == JsonPrimitive("recurrent") }
        val attention = states.indexOfFirst { it["kind"] == JsonPrimitive("attention_key") }
        val replay = states[place].getValue("replay")
        val (key, row) = replay.jsonObject.getValue("rows").jsonObject.entries.first()
        fun problem(value: JsonElement?, vararg path: Any) = problem(recurrent.with(path.toList(), value).toString())
        fun problem(value: String, vararg path: Any) = problem(JsonPrimitive(value), *path)

        assertSays("states.$place: shape [", problem("S", "states", place, "shape", 1))
        assertSays("is not fixed", problem("S", "states", place, "shape", 1))
        assertSays("is not fixed", problem(JsonArray(emptyList()), "states", place, "shape"))
        assertSays("of kind recurrent: replay belongs to states of fixed shape", problem(null, "states", place, "replay"))
        assertSays("of kind attention_key: replay belongs to", problem(replay, "states", attention, "replay"))
        assertSays("names 'embed', which is no part of role replay", problem("embed", "states", place, "replay", "part"))
        assertSays("names 'gone', which is no part of role replay", problem("gone", "states", place, "replay", "part"))
        assertSays("part 'replay_convolution' does not take past and give present", problem("replay_convolution", "states", place, "replay", "part"))
        assertSays("replay.rows: empty, expected at least one", problem(JsonObject(emptyMap()), "states", place, "replay", "rows"))
        assertSays("part 'replay_recurrent' takes the rows ", problem("x", "states", place, "replay", "rows", "other"))
        assertSays("rows 'residual_out' are not what 'replay_recurrent' takes", problem("residual_out", "states", place, "replay", "rows", key))

        // Rows of another shape, in agreement with what the replay takes.
        val parts = recurrent.jsonObject.getValue("parts").jsonArray.map { it.jsonObject }
        fun JsonElement.withFlat(part: Int, list: String, name: JsonElement): JsonElement {
            val value = parts[part].getValue(list).jsonArray.indexOfFirst { it.jsonObject["name"] == name }
            return with(listOf("parts", part, list, value, "shape"), Json.parseToJsonElement("""["T", 8]"""))
        }
        val taker = parts.indexOfFirst { it["name"] == JsonPrimitive("replay_recurrent") }
        val giver = parts.indexOfFirst { it["name"] == states[place]["part"] }
        val flat = recurrent.withFlat(taker, "inputs", JsonPrimitive(key)).withFlat(giver, "outputs", row)
        assertSays("is not [1, 'T', size]", this.problem(flat.toString()))
    }

    @Test
    fun `mixers belong to MoE layers`() {
        val early = manifestOf("smallthinker-float")
        val parts = early.jsonObject.getValue("parts").jsonArray.map { it.jsonObject }
        val mixer = parts.indexOfFirst { it["role"] == JsonPrimitive("mixer") }
        assertSays("a mixer part belongs to no MoE layer", problem(early.with(listOf("parts", mixer, "layer_idx"), JsonPrimitive(99)).toString()))
    }

    @Test
    fun `the residual is as wide as the parts say`() {
        fun sizes(bundle: String) = BundleManifest.parse(manifestOf(bundle).toString()).let { it.residualSize to it.model.hiddenSize.toLong() }
        assertEquals(sizes("qwen3_moe-float").second, sizes("qwen3_moe-float").first)
        assertEquals(2 * sizes("gemma4_text-float").second, sizes("gemma4_text-float").first)
    }

    @Test
    fun `shapes of experts`() {
        assertSays("expert_kinds.0: up_proj is [3,64], expected", problem(3, "expert_kinds", 0, "up_proj", "rows"))
        assertSays("beyond the expert's 64", problem(64, "expert_kinds", 0, "length_bytes"))
        assertSays("block_size and scales belong to", problem(32, "expert_kinds", 0, "up_proj", "bits"))
        assertSays("expert_kinds.0.hidden_size", problem(Long.MAX_VALUE, "expert_kinds", 0, "hidden_size"))
        val vast = document.with(listOf("expert_kinds", 0, "hidden_size"), JsonPrimitive(1L shl 47))
            .with(listOf("expert_kinds", 0, "gate_proj", "columns"), JsonPrimitive(1L shl 47))
        assertSays("beyond the expert's", problem(vast.toString()))
    }

    @Test
    fun `chat formats`() {
        fun format(role: String) = Json.parseToJsonElement(
            """{"chat_format":{"start":"","messages":{"$role":{"prefix":"<","suffix":">"}},"answer":"!"}}""",
        )
        val manifest = BundleManifest.parse(document.with(listOf("tokenizer"), format("user")).toString())
        assertEquals("<Hi>!", manifest.tokenizer!!.chatFormat!!.render(listOf(ChatMessage(ChatRole.USER, "Hi"))))
        assertSays("tokenizer.chat_format", problem(document.with(listOf("tokenizer"), format("tool")).toString()))
    }

    @Test
    fun `documents that are none`() {
        val nested = "[".repeat(100_000)
        for (bad in listOf("", "{", "[]", "null", "3", nested, """{"format_version":1,"parts":$nested""")) problem(bad)
        for (length in text.indices step 37) problem(text.substring(0, length))
        assertSays("alpha", problem(text.replaceFirst(Regex("\"alpha\": ?[0-9.]+"), "\"alpha\": NaN")))
    }
}
