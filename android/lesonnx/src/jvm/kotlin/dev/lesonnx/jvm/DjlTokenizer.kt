package dev.lesonnx.jvm

import ai.djl.huggingface.tokenizers.HuggingFaceTokenizer
import dev.lesonnx.BundleError
import dev.lesonnx.InputError
import dev.lesonnx.TokenTable
import dev.lesonnx.Tokenizer
import java.nio.file.Path

/** The tokenizers library itself, by DJL's binding. It unpacks its native library below `~/.djl.ai`. Owns the native tokenizer. */
class DjlTokenizer(path: Path, private val table: TokenTable) : Tokenizer {
    private val inner: HuggingFaceTokenizer = try {
        HuggingFaceTokenizer.newInstance(path, mapOf("truncation" to "false", "padding" to "false"))
    } catch (error: Exception) { // the binding throws many unrelated types
        throw BundleError("$path: not a tokenizer.json: ${error.message}", error)
    }

    override fun encode(text: String, addSpecialTokens: Boolean): IntArray {
        if (!Charsets.UTF_8.newEncoder().canEncode(text)) throw InputError("the text holds an unpaired surrogate, expected valid Unicode")
        val ids = inner.encode(text, addSpecialTokens, false).ids
        return IntArray(ids.size) { ids[it].toInt() }
    }

    override fun decode(ids: IntArray, skipSpecialTokens: Boolean): String =
        inner.decode(LongArray(ids.size) { ids[it].toLong() }, skipSpecialTokens)

    override fun tokenId(token: String): Int? = table.id(token)

    override fun tokenName(token: Int): String? = table.name(token)

    override fun isSilent(token: Int): Boolean = table.isSilent(token)

    override fun close(): Unit = inner.close()
}
