package dev.lesonnx

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtSession
import java.nio.file.Path

/**
 * The bundle's tokenizer.onnx, by the operators of onnxruntime-extensions in [operatorLibrary]; its [table] decodes. Owns its
 * session. [BundleError] where ONNX Runtime does not take the file.
 *
 * The operator HfJsonTokenizer came with 0.15 of onnxruntime-extensions. Maven's newest package is 0.13, so this is for apps
 * that build the library themselves.
 */
class OnnxTokenizer(path: Path, private val table: TokenTable, operatorLibrary: String) : Tokenizer {
    private val environment = OrtEnvironment.getEnvironment()

    // Closing them unloads the operators' library, so they live as long as the session.
    private val options = Ort.sessionOptions(optimise = true, numThreads = 1)
    private val session: OrtSession = try {
        options.registerCustomOpLibrary(operatorLibrary)
        Ort.openSession(path, options)
    } catch (error: OrtException) {
        options.close()
        throw BundleError("$path: $operatorLibrary cannot be used: ${Ort.firstLine(error)}", error)
    } catch (error: BundleError) {
        options.close()
        throw error
    }
    private val prefix = around("prefix_ids", path)
    private val suffix = around("suffix_ids", path)

    /** The special tokens before or after a text, from the model's metadata: decimal, separated by commas. */
    private fun around(key: String, path: Path): IntArray {
        val text = session.metadata.customMetadata[key].orEmpty()
        val ids = text.split(',').filter(String::isNotEmpty).map { it.toIntOrNull() }
        if (null in ids) {
            close()
            throw BundleError("$path: $key is '$text', expected numbers separated by commas")
        }
        return IntArray(ids.size) { checkNotNull(ids[it]) }
    }

    override fun encode(text: String, addSpecialTokens: Boolean): IntArray {
        checkUnicode(text)
        val ids = if (text.isEmpty()) IntArray(0) else bareIds(text)
        return if (addSpecialTokens) prefix + ids + suffix else ids
    }

    private fun bareIds(text: String): IntArray = try {
        OnnxTensor.createTensor(environment, arrayOf(text), longArrayOf(1)).use { input ->
            session.run(mapOf("text" to input), setOf("ids")).use { result ->
                val ids = (result[0] as OnnxTensor).longBuffer
                IntArray(ids.remaining()) { ids.get(it).toInt() }
            }
        }
    } catch (error: OrtException) {
        throw InputError("the text cannot be tokenized: ${Ort.firstLine(error)}", error)
    }

    override fun decode(ids: IntArray, skipSpecialTokens: Boolean): String = table.decode(ids, skipSpecialTokens)

    override fun tokenId(token: String): Int? = table.id(token)

    override fun tokenName(token: Int): String? = table.name(token)

    override fun isSilent(token: Int): Boolean = table.isSilent(token)

    override fun close() {
        session.close()
        options.close()
    }
}
