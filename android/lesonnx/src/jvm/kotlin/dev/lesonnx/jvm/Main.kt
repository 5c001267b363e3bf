package dev.lesonnx.jvm

import dev.lesonnx.GenerationOptions
import dev.lesonnx.GenerationReport
import dev.lesonnx.InputError
import dev.lesonnx.LesonnxError
import dev.lesonnx.LoadOptions
import dev.lesonnx.Memory
import dev.lesonnx.Model
import dev.lesonnx.Platform
import dev.lesonnx.SamplingOptions
import dev.lesonnx.Telemetry
import dev.lesonnx.speculative.DraftCounts
import dev.lesonnx.speculative.NO_DRAFTER
import java.io.IOException
import java.io.PrintStream
import java.nio.charset.CharacterCodingException
import java.nio.file.Files
import java.nio.file.InvalidPathException
import java.nio.file.Path
import java.util.Locale
import kotlin.system.exitProcess
import kotlinx.coroutines.runBlocking
import kotlinx.serialization.json.JsonNull
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.JsonPrimitive
import kotlinx.serialization.json.add
import kotlinx.serialization.json.buildJsonObject
import kotlinx.serialization.json.put
import kotlinx.serialization.json.putJsonArray
import sun.misc.Signal

private const val USAGE = """usage: lesonnx run BUNDLE (--prompt TEXT | --prompt-file FILE | --prompt-ids ID,ID,...) [options]

Generates from a prompt, as the Python command of that name does.

  --image FILE           a picture, for the prompt's placeholder or in front of it; may be given several times
  --schedule NAME        how experts get into memory: les (default), cache, on-demand, resident
  --engine NAME          what computes an expert: auto (default), kernel, session
  --expert-budget SIZE   most bytes of experts in memory (default: all of them), such as 500MiB
  --memory-budget SIZE   most memory of the whole process; experts get what is left
  --policy NAME, --loaders N, --[no-]compute-first, --[no-]lookahead, --prefill-chunk N, --threads N
  --draft NAME           what proposes tokens to verify several at once: none (default), ngram, draft-model, dspark, mtp
  --draft-model BUNDLE   the bundle that drafts, for --draft draft-model
  --accelerate MODE      dense parts on an accelerator, where bundle and ONNX Runtime have one: auto (default), off; cpu tries those parts here
  --max-tokens N         most tokens to generate (default: 256); also --max-new-tokens
  --temperature T, --top-k K, --top-p P, --min-p P, --repetition-penalty R, --seed S
  --stop TEXT            end before this text; may be given several times
  --ignore-eos           go on after the end-of-sequence token
  --json                 print one JSON object instead of streaming text

The kernel's library is what the environment's LESONNX_LIBRARY names. Experts lie outside Java's heap: -Xmx256m is heap enough,
and -XX:MaxDirectMemorySize=8g lets experts, buffers and attention caches take that much. For a memory budget also set
MALLOC_MMAP_THRESHOLD_=131072 in the environment, so that glibc gives freed memory back."""

private val WITH_VALUE = setOf(
    "--prompt", "--prompt-file", "--prompt-ids", "--image", "--schedule", "--engine", "--expert-budget", "--memory-budget", "--policy",
    "--loaders", "--prefill-chunk", "--threads", "--draft", "--draft-model", "--accelerate", "--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p",
    "--repetition-penalty", "--seed", "--stop",
)
private val FLAGS =
    setOf("--compute-first", "--no-compute-first", "--lookahead", "--no-lookahead", "--ignore-eos", "--json", "--help")
private val ALIASES = mapOf("--max-new-tokens" to "--max-tokens")

/** The command line of the JVM; see [USAGE]. */
fun main(arguments: Array<String>) {
    // Ending in order would have ONNX Runtime freed while it computes, which crashes; nothing here has to be put in order.
    for ((signal, number) in listOf("INT" to 2, "TERM" to 15)) {
        Signal.handle(Signal(signal)) { Runtime.getRuntime().halt(128 + number) }
    }
    exitProcess(run(arguments.asList(), System.out, System.err))
}

/** Runs a command; gives its exit code: 2 for bad input, 1 for a failure on the way. Errors are one line. */
internal fun run(arguments: List<String>, out: PrintStream, err: PrintStream, platform: Platform = JvmPlatform()): Int = try {
    when (arguments.firstOrNull()) {
        "run" -> generate(Arguments(arguments.drop(1), WITH_VALUE, FLAGS, ALIASES), out, err, platform)
        null, "--help", "-h" -> out.println(USAGE)
        else -> throw InputError("no such command '${arguments.first()}' (see --help)")
    }
    0
} catch (error: LesonnxError) {
    err.println("error: ${error.message.orEmpty().trim().split(Regex("\\s+")).joinToString(" ")}")
    if (error is InputError) 2 else 1
}

private fun generate(arguments: Arguments, out: PrintStream, err: PrintStream, platform: Platform) {
    if (arguments.has("--help")) return out.println(USAGE)
    val directory = when (arguments.rest.size) {
        0 -> throw InputError("missing argument BUNDLE (see --help)")
        1 -> path(arguments.rest.single())
        else -> throw InputError("surplus argument '${arguments.rest[1]}' (see --help)")
    }
    val prompt = prompt(arguments)
    val options = generationOptions(arguments)
    val images = arguments.all("--image").map { readPicture(path(it)) }
    Model.load(directory, platform, loadOptions(arguments)).use { model ->
        for (note in model.notes) err.println("note: $note")
        val generation = when (prompt) {
            is Prompt.Text -> model.generate(prompt.text, options, images)
            is Prompt.Ids -> model.generate(prompt.ids, options, images)
        }
        runBlocking {
            if (arguments.has("--json")) {
                val text = generation.text()
                out.println(describe(model, generation.report, text))
            } else {
                generation.tokens.collect { token ->
                    out.print(token.text)
                    out.flush()
                }
                out.println()
                err.println(summary(model, generation.report))
            }
        }
    }
}

private sealed interface Prompt {
    class Text(val text: String) : Prompt

    class Ids(val ids: IntArray) : Prompt
}

private fun prompt(arguments: Arguments): Prompt {
    val given = listOf("--prompt", "--prompt-file", "--prompt-ids").filter(arguments::has)
    val name = given.singleOrNull() ?: throw InputError("give exactly one of --prompt, --prompt-file and --prompt-ids")
    val value = arguments.text(name).orEmpty()
    return when (name) {
        "--prompt-ids" -> Prompt.Ids(
            value.split(",").map {
                it.trim().toIntOrNull() ?: throw InputError("--prompt-ids '$value' is not a list of token ids parted by commas")
            }.toIntArray(),
        )
        "--prompt-file" -> try {
            Prompt.Text(Files.readString(path(value)))
        } catch (_: CharacterCodingException) {
            throw InputError("$value: not readable as text: it is not UTF-8")
        } catch (error: IOException) {
            throw InputError("$value: not readable as text: ${error.javaClass.simpleName}")
        }
        else -> Prompt.Text(if (value == "-") String(System.`in`.readBytes(), Charsets.UTF_8) else value)
    }
}

private fun path(text: String): Path = try {
    Path.of(text)
} catch (_: InvalidPathException) {
    throw InputError("'${text.replace("\u0000", "\\0")}' is not a path")
}

private fun loadOptions(arguments: Arguments) = LoadOptions(
    schedule = arguments.text("--schedule") ?: "les",
    engine = arguments.text("--engine") ?: "auto",
    numLoaders = arguments.int("--loaders"),
    policy = arguments.text("--policy"),
    computeFirst = arguments.switch("--compute-first"),
    lookahead = arguments.switch("--lookahead"),
    expertBudgetBytes = arguments.bytes("--expert-budget"),
    memoryBudgetBytes = arguments.bytes("--memory-budget"),
    prefillChunkTokens = arguments.int("--prefill-chunk"),
    numThreads = arguments.int("--threads"),
    draft = arguments.text("--draft") ?: NO_DRAFTER,
    accelerate = arguments.text("--accelerate") ?: "auto",
    draftModel = arguments.text("--draft-model")?.let(::path),
)

private fun generationOptions(arguments: Arguments): GenerationOptions {
    val sampling = SamplingOptions(
        temperature = arguments.double("--temperature") ?: 0.0,
        topK = arguments.int("--top-k") ?: 0,
        topP = arguments.double("--top-p") ?: 1.0,
        minP = arguments.double("--min-p") ?: 0.0,
        repetitionPenalty = arguments.double("--repetition-penalty") ?: 1.0,
        seed = arguments.unsigned("--seed") ?: 0u,
    )
    return GenerationOptions(
        maxNewTokens = arguments.int("--max-tokens"),
        sampling = sampling,
        stop = arguments.all("--stop"),
        ignoreEos = arguments.has("--ignore-eos"),
    )
}

/** What `--json` prints, under the names that the Python command uses: text, tokens, times, bytes read, peak memory. */
private fun describe(model: Model, report: GenerationReport, text: String): JsonObject = buildJsonObject {
    put("text", text)
    putJsonArray("tokens") { report.tokenIds.forEach { add(it) } }
    put("prompt_tokens", report.promptTokens)
    put("pictures", report.pictures)
    put("image_tokens", report.imageTokens)
    put("vision_ms", rounded(report.visionMs))
    put("finish_reason", report.finishReason?.name?.lowercase(Locale.ROOT))
    put("prefill_ms", rounded(report.prefillMs))
    put("decode_ms", rounded(report.decodeMs))
    put("tokens_per_s", rounded(report.tokensPerS))
    for ((name, value) in counts(model.telemetry)) put(name, value)
    put("peak_memory_bytes", Memory.peakBytes())
    put("expert_bytes", model.bundle.expertBytes)
    put("schedule", model.options.schedule)
    put("engine", model.engineName)
    put("expert_budget_bytes", model.expertBudgetBytes)
    put("draft", model.options.draft)
    put("drafts", report.drafts?.let(::describe) ?: JsonNull)
}

private fun describe(drafts: DraftCounts): JsonObject = buildJsonObject {
    for ((name, counts) in listOf("drafted" to drafts.drafted, "judged" to drafts.judged, "accepted" to drafts.accepted)) {
        putJsonArray(name) { counts.forEach { add(it) } }
    }
    put("passes", drafts.passes)
    put("draft_ms", rounded(drafts.draftMs))
}

/** How many drafted tokens stayed, for the summary; nothing without a drafter. */
private fun summary(drafts: DraftCounts?): String {
    if (drafts == null) return ""
    val first = if (drafts.judged[0] == 0) "" else ", %d%% of the first ones".format(Math.round(100.0 * drafts.accepted[0] / drafts.judged[0]))
    return "${drafts.accepted.sum()} of ${drafts.drafted.sum()} drafted tokens accepted$first; "
}

/** What the prompt's pictures took, for the summary; nothing without. */
private fun pictures(report: GenerationReport): String {
    if (report.pictures == 0) return ""
    val noun = if (report.pictures == 1) "picture" else "pictures"
    return "%d %s of %d tokens read in %.2f s; ".format(Locale.ROOT, report.pictures, noun, report.imageTokens, report.visionMs / 1e3)
}

private fun counts(telemetry: Telemetry): Map<String, JsonPrimitive> = mapOf(
    "loads" to JsonPrimitive(telemetry.loads),
    "hits" to JsonPrimitive(telemetry.hits),
    "late" to JsonPrimitive(telemetry.late),
    "misses" to JsonPrimitive(telemetry.misses),
    "read_bytes" to JsonPrimitive(telemetry.readBytes),
    "lookahead_loads" to JsonPrimitive(telemetry.lookaheadLoads),
    "lookahead_used" to JsonPrimitive(telemetry.lookaheadUsed),
    "lookahead_wasted" to JsonPrimitive(telemetry.lookaheadWasted),
    "read_ms" to JsonPrimitive(rounded(telemetry.readMs)),
    "stall_ms" to JsonPrimitive(rounded(telemetry.stallMs)),
    "expert_ms" to JsonPrimitive(rounded(telemetry.expertMs)),
    "lookahead_ms" to JsonPrimitive(rounded(telemetry.lookaheadMs)),
    "schedule_ms" to JsonPrimitive(rounded(telemetry.scheduleMs)),
    "dense_ms" to JsonPrimitive(rounded(telemetry.denseMs)),
)

private fun rounded(value: Double): Double = Math.round(value * 1000) / 1000.0

/** One line on how it went. */
private fun summary(model: Model, report: GenerationReport): String {
    val telemetry = model.telemetry
    return String.format(
        Locale.ROOT,
        "[%s%d prompt tokens in %.2f s, %d generated at %.1f tokens/s; %d expert loads, %s read; %.0f %% hits;" +
            " %sexperts %s, budget %s; process peak %s]",
        pictures(report),
        report.promptTokens,
        report.prefillMs / 1e3,
        report.tokenIds.size,
        report.tokensPerS,
        telemetry.loads,
        formatBytes(telemetry.readBytes),
        100 * telemetry.hitRate,
        summary(report.drafts),
        formatBytes(model.bundle.expertBytes),
        formatBytes(model.expertBudgetBytes),
        formatBytes(Memory.peakBytes()),
    )
}
