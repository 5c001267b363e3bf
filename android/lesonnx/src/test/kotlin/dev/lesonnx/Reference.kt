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
    /** The same by twins on the CPU provider. */
    val twins: List<Case> = emptyList(),
    val drafter: Drafts? = null,
    /** Prompts with pictures, stage by stage. */
    val vision: List<Pictured> = emptyList(),
    val tokenizer: List<Tokenized> = emptyList(),
) {
    /** Greedy drafts of the bundle's own drafter, pass by pass, and whole blocks that it drew before each. */
    @Serializable
    class Drafts(
        @SerialName("prompt_ids") val promptIds: List<Int>,
        @SerialName("draft_tokens") val draftTokens: Int,
        val passes: List<Pass>,
        @SerialName("token_ids") val tokenIds: List<Int>,
        val sampling: Sampling,
        val sampled: List<List<Int>>,
    ) {
        @Serializable
        class Pass(val drafted: List<Int>, val confidence: List<Int>, val accepted: Int)
    }

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
        val logitBits: Array<IntArray> by lazy { bitsOf(logits, logitsShape) }

        val samplingOptions: SamplingOptions get() = sampling?.options ?: SamplingOptions()
    }

    @Serializable
    class Sampling(
        val temperature: Double,
        @SerialName("top_k") val topK: Int,
        @SerialName("top_p") val topP: Double,
        @SerialName("min_p") val minP: Double,
        @SerialName("repetition_penalty") val repetitionPenalty: Double,
        val seed: ULong,
    ) {
        val options: SamplingOptions get() = SamplingOptions(temperature, topK, topP, minP, repetitionPenalty, seed)
    }

    /** A prompt with pictures: how they are cut, prepared and seen, and what is generated. */
    @Serializable
    class Pictured(
        val name: String,
        val prompt: String,
        val files: List<String>,
        val images: List<String>,
        val views: List<List<List<Int>>>,
        @SerialName("prompt_ids") val promptIds: List<Int>,
        @SerialName("position_ids") val positionIds: List<List<Int>>,
        @SerialName("pixel_values") val pixelValues: String,
        val features: String,
        @SerialName("features_shape") val featuresShape: List<Int>,
        @SerialName("token_ids") val tokenIds: List<Int>,
        val logits: String,
        @SerialName("logits_shape") val logitsShape: List<Int>,
    ) {
        val logitBits: Array<IntArray> by lazy { bitsOf(logits, logitsShape) }

        /** The crops' pixels, as bits, one crop after another. */
        val pixelBits: IntArray get() = bitsOf(pixelValues)

        val featureBits: IntArray get() = bitsOf(features)
    }

    @Serializable
    class Tokenized(val text: String, val ids: List<Int>)

    fun case(name: String): Case = cases.single { it.name == name }

    companion object {
        private val json = Json { ignoreUnknownKeys = true }

        /** A file of floats beside the references, as bits. */
        private fun bitsOf(file: String): IntArray {
            val ints = ByteBuffer.wrap(Files.readAllBytes(TestData.mobile.resolve("reference").resolve(file))).order(ByteOrder.LITTLE_ENDIAN).asIntBuffer()
            return IntArray(ints.remaining()).also(ints::get)
        }

        /** The same row by row. */
        private fun bitsOf(file: String, shape: List<Int>): Array<IntArray> {
            val bits = bitsOf(file)
            check(bits.size == shape[0] * shape[1]) { "$file has ${bits.size} floats, expected $shape" }
            return Array(shape[0]) { bits.copyOfRange(it * shape[1], (it + 1) * shape[1]) }
        }

        /** The bundles that `tools/make_mobile_fixtures.py` exports, but for those that need a newer ONNX Runtime than this one. */
        val BUNDLES: List<String> by lazy {
            listOf(
                "sample-int4", "sample-int4-kv8", "qwen3_moe-float", "qwen2_moe-float", "qwen2_moe-int4", "qwen3_next-float",
                "qwen3_next-portable-float", "lfm2_moe-float", "deepseek_v3-float", "gpt_oss-float", "gemma4_text-float", "smallthinker-float",
                "sample-dspark-float", "sample-dspark-int4", "qwen3_moe-twins-ios-float", "qwen2_moe-twins-android-int4",
                "qwen2_moe-mixed", "minicpmv4_7-float",
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
internal fun openRunner(bundle: Bundle, options: LoadOptions = LoadOptions(), platform: Platform = dev.lesonnx.platform): Runner {
    Ort.environment(REFERENCE_THREADS)
    val config = options.schedulerConfig()
    val engine = makeEngine(options.engine, bundle, platform, REFERENCE_THREADS)
    val chunk = options.prefillChunkTokens ?: bundle.manifest.prefillChunkTokens.toInt()
    val loader = ExpertLoader(bundle, engine, config, options.expertBudgetBytes ?: bundle.expertBytes, config.maxLoads)
    return Runner(bundle, loader, platform, chunk, REFERENCE_THREADS, Twins(bundle, platform, options.accelerate, REFERENCE_THREADS))
}

/** Whether logits are these, bit for bit; a failure names the first that is not. */
internal fun assertSameBits(expected: IntArray, logits: FloatArray, what: String) {
    assertEquals(expected.size, logits.size, what)
    val place = expected.indices.firstOrNull { expected[it] != logits[it].toRawBits() } ?: return
    fail("$what: logit $place is ${logits[place]}, expected ${Float.fromBits(expected[place])}")
}

/** Whether a runner gives a case's logits, bit for bit, and tokens. */
internal fun assertIsReference(runner: Runner, case: Reference.Case) {
    val sampler = Sampler(case.samplingOptions)
    sampler.acceptAll(case.promptIds.toIntArray())
    var logits = runner.prefill(case.promptIds.toIntArray())
    if (case.stepIds.isNotEmpty()) {
        logits = runner.step(case.stepIds.toIntArray(), intArrayOf(case.keptTokens - 1))
        runner.rewind(case.promptIds.size + case.keptTokens)
    }
    for ((step, expected) in case.tokenIds.withIndex()) {
        assertSameBits(case.logitBits[step], logits, "step $step")
        val token = sampler.sample(logits)
        assertEquals(expected, token, "token of step $step")
        sampler.accept(token)
        if (step + 1 < case.tokenIds.size) logits = runner.step(intArrayOf(token), intArrayOf(0))
    }
}
