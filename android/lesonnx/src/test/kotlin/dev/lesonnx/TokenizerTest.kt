package dev.lesonnx

import dev.lesonnx.jvm.DjlTokenizer
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.jsonObject
import org.junit.jupiter.api.Assumptions.assumeTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.assertThrows
import org.junit.jupiter.api.io.TempDir
import java.nio.file.Path
import kotlin.io.path.writeText
import kotlin.random.Random
import kotlin.test.assertContains
import kotlin.test.assertEquals
import kotlin.test.assertNull
import kotlin.test.assertTrue

class TokenizerTest {
    private val bundle = Bundle(Reference.bundle("sample-int4"))
    private val reference = Reference.of("sample-int4")

    private val json = bundle.file("tokenizer/tokenizer.json")

    private fun both(test: (Tokenizer) -> Unit) {
        listOf(checkNotNull(platform.openTokenizer(bundle)), BpeTokenizer.read(json)).forEach { it.use(test) }
    }

    @Test
    fun `ids are Python's, by the tokenizers library and by Kotlin`() {
        assertTrue(reference.tokenizer.size > 10)
        both { tokenizer ->
            for (expected in reference.tokenizer) {
                val ids = tokenizer.encode(expected.text, addSpecialTokens = false).toList()
                assertEquals(expected.ids, ids, "${tokenizer.javaClass.simpleName}: '${expected.text}'")
            }
        }
    }

    /** LESONNX_EXTENSIONS names onnxruntime-extensions 0.15 or later, as a library of its own: no package on Maven has it. */
    @Test
    fun `tokenizer-onnx gives Python's ids where its operators are`() {
        val library = System.getenv("LESONNX_EXTENSIONS")
        assumeTrue(library != null, "LESONNX_EXTENSIONS is not set")
        OnnxTokenizer(bundle.file("tokenizer/tokenizer.onnx"), TokenTable.read(json), library).use { tokenizer ->
            // The operator knows fewer ways to cut words: the exporter names the texts on which it differs.
            val differing = reference.tokenizer.filter { it.ids != tokenizer.encode(it.text, true).toList() }.map { it.text }
            assertTrue(differing.size <= reference.tokenizer.size / 10, "$differing")
        }
    }

    @Test
    fun `a library that has no operators is named`() {
        val error = assertThrows<BundleError> { OnnxTokenizer(bundle.file("tokenizer/tokenizer.onnx"), TokenTable.read(json), json.toString()) }
        assertContains(checkNotNull(error.message), "$json cannot be used: ")
    }

    /** Texts of what tokenizers trip over: spaces of all kinds, digits, marks, emoji, special tokens and their beginnings. */
    private fun randomText(random: Random): String = (0 until random.nextInt(1, 25)).joinToString("") {
        PIECES[random.nextInt(PIECES.size)]
    }

    private fun randomTextsEncodeAlike(path: Path) {
        val random = Random(11)
        val ours = BpeTokenizer.read(path)
        DjlTokenizer(path, TokenTable.read(path)).use { tokenizer ->
            repeat(2000) {
                val text = randomText(random)
                val adds = random.nextBoolean()
                assertEquals(tokenizer.encode(text, adds).toList(), ours.encode(text, adds).toList(), "'$text'")
            }
        }
    }

    @Test
    fun `any text encodes as the tokenizers library encodes it`() = randomTextsEncodeAlike(json)

    @Test
    fun `other byte-level tokenizers encode as the tokenizers library encodes them`(@TempDir directory: Path) {
        val document = TestData.json(json).jsonObject
        val qwen = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
        val split = """{"type": "Split", "pattern": {"Regex": "$qwen"}, "behavior": "Isolated", "invert": false}"""
        val bytes = """{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}"""
        val template = """{"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}, "<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}}}"""
        for (changes in listOf(
            mapOf("normalizer" to """{"type": "NFC"}""", "pre_tokenizer" to """{"type": "Sequence", "pretokenizers": [$split, $bytes]}"""),
            mapOf("post_processor" to template, "pre_tokenizer" to """{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}"""),
            mapOf("normalizer" to """{"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}"""),
        )) {
            val path = directory.resolve("tokenizer.json")
            path.writeText(JsonObject(document + changes.mapValues { Json.parseToJsonElement(it.value) }).toString())
            randomTextsEncodeAlike(path)
        }
    }

    @Test
    fun `any ids decode as the tokenizers library decodes them`() = randomIdsDecodeAlike(json, 2060)

    private fun randomIdsDecodeAlike(path: Path, numIds: Int) {
        val random = Random(7)
        val table = TokenTable.read(path)
        DjlTokenizer(path, table).use { tokenizer ->
            repeat(2000) {
                val ids = IntArray(random.nextInt(1, 12)) { random.nextInt(numIds) }
                val skips = random.nextBoolean()
                assertEquals(tokenizer.decode(ids, skips), table.decode(ids, skips), ids.joinToString())
            }
        }
    }

    @Test
    fun `tokenizers with byte fallback and word marks do as the tokenizers library does`(@TempDir directory: Path) {
        val words = listOf("<unk>", "<s>", "\u2581", "a", "b", "c", "\u00e9", "1", "\u2581a", "\u2581\u2581", "ab", "abc", "\u2581abc", "1\u2581") +
            (0..255).map { "<0x%02X>".format(it) }
        val merges = listOf("\u2581 a", "\u2581 \u2581", "a b", "ab c", "\u2581 abc", "1 \u2581")
        val vocab = words.mapIndexed { id, word -> "\"$word\": $id" }.joinToString()
        val special = """[{"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": true, "normalized": false, "special": true}]"""
        val replace = """{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}"""
        val mark = """{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}"""
        val strip = """{"type": "Strip", "content": " ", "start": 1, "stop": 0}"""
        val llama = """{"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, $mark]}"""
        fun metaspace(scheme: String) = """{"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "$scheme", "split": ${scheme != "first"}}"""
        for ((normalizer, preTokenizer, decoder) in listOf(
            Triple(llama, "null", """{"type": "Sequence", "decoders": [$replace, {"type": "ByteFallback"}, {"type": "Fuse"}, $strip]}"""),
            Triple("null", metaspace("always"), metaspace("always")),
            Triple("null", metaspace("first"), metaspace("first")),
            Triple("null", metaspace("never"), metaspace("never")),
            Triple("null", "null", "null"),
        )) {
            for (fallback in listOf(true, false)) {
                val model = """{"type": "BPE", "dropout": null, "byte_fallback": $fallback, "fuse_unk": true, "unk_token": "<unk>", "vocab": {$vocab},
                    "merges": [${merges.joinToString { "\"$it\"" }}]}"""
                val path = directory.resolve("tokenizer.json")
                path.writeText(
                    """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": $special, "normalizer": $normalizer,
                       "pre_tokenizer": $preTokenizer, "post_processor": null, "decoder": $decoder, "model": $model}""",
                )
                randomIdsDecodeAlike(path, words.size + 5)
                randomTextsEncodeAlike(path)
            }
        }
    }

    @Test
    fun `names and special tokens`() {
        both { tokenizer ->
            assertEquals(2, tokenizer.tokenId("<|im_end|>"))
            assertEquals("<|im_end|>", tokenizer.tokenName(2))
            assertNull(tokenizer.tokenId("no such token"))
            assertNull(tokenizer.tokenName(1 shl 20))
            assertTrue(tokenizer.isSilent(2) && tokenizer.isSilent(1 shl 20) && !tokenizer.isSilent(300))
            assertEquals("", tokenizer.decode(intArrayOf(2)))
            assertEquals("<|im_end|>", tokenizer.decode(intArrayOf(2), skipSpecialTokens = false))
            assertEquals(2, tokenizer.encode("a<|im_end|>", addSpecialTokens = false).last())
            assertThrows<InputError> { tokenizer.encode("\ude00", addSpecialTokens = false) }
        }
    }

    @Test
    fun `a file that is no tokenizer is named`(@TempDir directory: Path) {
        val path = directory.resolve("tokenizer.json")
        for (text in listOf("", "{}", "[1]", """{"model": {"vocab": {"a": -1}}}""", """{"model": {"vocab": {"a": "b"}}}""", """{"model": {"vocab": {}}, "decoder": {"type": "CTC"}}""")) {
            path.writeText(text)
            val error = assertThrows<BundleError> { TokenTable.read(path) }
            assertTrue(error.message!!.startsWith("$path: ") && '\n' !in error.message!!, error.message)
        }
        assertThrows<BundleError> { TokenTable.read(directory.resolve("nothing.json")) }
        path.writeText("""{"model": {"type": "Unigram", "vocab": [["a", -1.0]]}}""")
        assertEquals(
            "$path: not a tokenizer.json that this lesonnx reads: model 'Unigram' is not known",
            assertThrows<BundleError> { BpeTokenizer.read(path) }.message,
        )
    }

    private companion object {
        val PIECES = listOf(
            " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\u0085", "a", "b", "abc", "ab", "The", "LORD", "'s", "'S", "'ll", "'", "1", "12", "1984",
            "\u0663", "\u00bd", "\u00e9", "e\u0301", "\u0301", "\u4e2d\u6587", "\ud83d\ude00", "\ud83d\udc69\u200d\ud83d\udc67", "\u2581", ".", ",", "!?", "...", "_", "-", "\u2014",
            "<s>", "<|im_end|>", "<|im_start|>", "<|im", "<|endoftext|>", "\ufb01", "\u0130", "K",
        )
    }
}
