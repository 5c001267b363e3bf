package dev.lesonnx

import dev.lesonnx.jvm.JvmPlatform
import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable
import kotlinx.serialization.json.Json
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.Files
import java.nio.file.Path
import kotlin.test.assertEquals
import kotlin.test.fail

/** The threads that the references were computed with. */
internal const val REFERENCE_THREADS = 2

/** What the Python runner gave for a bundle, under the ONNX Runtime that this process has. */
@Serializable
internal class Reference(
    val onnxruntime: String,
    val bundle: String,
    @SerialName("num_threads") val numThreads: Int,
    @SerialName("prefill_chunk_tokens") val prefillChunkTokens: Int,
    @SerialName("expert_budget_bytes") val expertBudgetBytes: Map<String, Long>,
    val cases: List<Case>,
    val rewinds: List<Case>,
    val tokenizer: List<Tokenized> = emptyList(),
) {
    @Serializable
    class Case(
        val name: String,
        val engine: String,
        val prompt: String?,
        @SerialName("prompt_ids") val promptIds: List<Int>,
        /** Of a rewind: a step after the prompt, and how many of its tokens stay. */
        @SerialName("step_ids") val stepIds: List<Int> = emptyList(),
        @SerialName("kept_tokens") val keptTokens: Int = 0,
        @SerialName("token_ids") val tokenIds: List<Int>,
        val logits: String,
        @SerialName("logits_shape") val logitsShape: List<Int>,
        val sampling: Sampling?,
        val text: String? = null,
    ) {
        /** The logits from which each token was chosen, as bits. */
        val logitBits: Array<IntArray> by lazy {
            val ints = ByteBuffer.wrap(Files.readAllBytes(TestData.mobile.resolve("reference").resolve(logits))).order(ByteOrder.LITTLE_ENDIAN).asIntBuffer()
            check(ints.remaining() == logitsShape[0] * logitsShape[1]) { "$logits has ${ints.remaining()} floats, expected $logitsShape" }
            Array(logitsShape[0]) { IntArray(logitsShape[1]).also(ints::get) }
        }

        val samplingOptions: SamplingOptions
            get() = sampling?.run { SamplingOptions(temperature, topK, topP, minP, repetitionPenalty, seed) } ?: SamplingOptions()
    }

    @Serializable
    class Sampling(
        val temperature: Double,
        @SerialName("top_k") val topK: Int,
        @SerialName("top_p") val topP: Double,
        @SerialName("min_p") val minP: Double,
        @SerialName("repetition_penalty") val repetitionPenalty: Double,
        val seed: ULong,
    )

    @Serializable
    class Tokenized(val text: String, val ids: List<Int>)

    fun case(name: String): Case = cases.single { it.name == name }

    companion object {
        private val json = Json { ignoreUnknownKeys = true }

        /** The bundles that `tools/make_mobile_fixtures.py` exports, but for those that need a newer ONNX Runtime than this one. */
        val BUNDLES: List<String> by lazy {
            listOf(
                "sample-int4", "sample-int4-kv8", "qwen3_moe-float", "qwen2_moe-float", "qwen2_moe-int4", "qwen3_next-float",
                "qwen3_next-portable-float", "lfm2_moe-float", "deepseek_v3-float", "gpt_oss-float", "gemma4_text-float", "smallthinker-float",
                "qwen2_moe-mixed",
            ).filter(::runsHere)
        }

        /** Those with states of fixed shape. */
        val RECURRENT: List<String> get() = BUNDLES.filter { name -> Bundle(bundle(name)).manifest.states.any { it.replay != null } }

        private fun runsHere(name: String): Boolean {
            val needed = Bundle(bundle(name)).manifest.onnxruntimeAtLeast
            return try {
                Ort.checkVersion(needed, Ort.environment(REFERENCE_THREADS).version)
                true
            } catch (_: BundleError) {
                false
            }
        }

        fun bundle(name: String): Path = TestData.mobile.resolve("bundles").resolve(name).also {
            check(Files.isDirectory(it)) { "$it is not there; make it with tools/make_mobile_fixtures.py ${TestData.mobile}" }
        }

        fun of(bundle: String): Reference {
            val version = Ort.environment(REFERENCE_THREADS).version
            val path = TestData.mobile.resolve("reference/$bundle.$version.json")
            return json.decodeFromString<Reference>(Files.readString(path)).also {
                check(it.onnxruntime == version && it.numThreads == REFERENCE_THREADS) { "$path is of another version or thread count" }
            }
        }
    }
}

/** The JVM with the kernel that `cmake -S lesonnx/native -B build/kernel` or the Python package has built. */
internal val platform: JvmPlatform by lazy {
    val candidates = listOfNotNull(
        System.getenv("LESONNX_LIBRARY")?.let(Path::of),
        TestData.root.resolve("build/kernel/liblesonnx.so"),
        TestData.root.resolve("lesonnx/native/liblesonnx.so"),
    )
    JvmPlatform(checkNotNull(candidates.firstOrNull(Files::isRegularFile)) { "the kernel is not built: none of $candidates" })
}

/** A model of a fixture, with the threads of the references. */
internal fun loadFixture(bundle: String, options: LoadOptions = LoadOptions(), platform: Platform = dev.lesonnx.platform): Model =
    Model.load(Reference.bundle(bundle), platform, options.copy(numThreads = REFERENCE_THREADS))

/** A runner alone, for tests that look at logits. */
internal fun openRunner(bundle: Bundle, options: LoadOptions, platform: Platform = dev.lesonnx.platform): Runner {
    Ort.environment(REFERENCE_THREADS)
    val config = options.schedulerConfig()
    val engine = makeEngine(options.engine, bundle, platform, REFERENCE_THREADS)
    val chunk = options.prefillChunkTokens ?: bundle.manifest.prefillChunkTokens.toInt()
    val loader = ExpertLoader(bundle, engine, config, options.expertBudgetBytes ?: bundle.expertBytes, config.maxLoads)
    return Runner(bundle, loader, platform, chunk, REFERENCE_THREADS)
}

/** Whether logits are these, bit for bit; a failure names the first that is not. */
internal fun assertSameBits(expected: IntArray, logits: FloatArray, what: String) {
    assertEquals(expected.size, logits.size, what)
    val place = expected.indices.firstOrNull { expected[it] != logits[it].toRawBits() } ?: return
    fail("$what: logit $place is ${logits[place]}, expected ${Float.fromBits(expected[place])}")
}
