package dev.lesonnx

import dev.lesonnx.jvm.formatBytes
import dev.lesonnx.jvm.parseBytes
import dev.lesonnx.jvm.run
import java.io.ByteArrayOutputStream
import java.io.PrintStream
import java.nio.file.Path
import kotlin.io.path.writeBytes
import kotlin.io.path.writeText
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertTrue
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonNull
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import kotlinx.serialization.json.jsonPrimitive
import kotlinx.serialization.json.long
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir

/** The JVM's command line: what Python's prints, and one line for every error. */
internal class MainTest {
    @TempDir
    lateinit var directory: Path

    private val sample = Reference.bundle("sample-int4").toString()

    private class Outcome(val code: Int, val out: String, val err: String)

    private fun lesonnx(vararg arguments: String): Outcome {
        val out = ByteArrayOutputStream()
        val err = ByteArrayOutputStream()
        val code = run(arguments.asList(), PrintStream(out, true, Charsets.UTF_8), PrintStream(err, true, Charsets.UTF_8), platform)
        return Outcome(code, out.toString(Charsets.UTF_8), err.toString(Charsets.UTF_8))
    }

    private fun json(outcome: Outcome): JsonObject {
        assertEquals(0, outcome.code, outcome.err)
        return Json.parseToJsonElement(outcome.out).jsonObject
    }

    @Test
    fun `the tokens and the text are Python's`() {
        val case = Reference.of("sample-int4").case("greedy-kernel")
        val common = arrayOf("run", sample, "--prompt", case.prompt!!, "--max-new-tokens", "${case.tokenIds.size}", "--threads=2")
        for (schedule in SCHEDULES) {
            val found = json(lesonnx(*common, "--schedule", schedule, "--engine", "kernel", "--json"))
            assertEquals(case.tokenIds, GoldenTraces.ints(found.getValue("tokens")).asList())
            assertEquals(case.text, found.getValue("text").jsonPrimitive.content)
            assertEquals(schedule, found.getValue("schedule").jsonPrimitive.content)
            assertTrue(found.getValue("read_bytes").jsonPrimitive.long > 0)
            assertTrue(found.getValue("peak_memory_bytes").jsonPrimitive.long > 10_000_000)
        }
        val streamed = lesonnx(*common)
        assertEquals(case.text + "\n", streamed.out)
        assertTrue("40 generated" in streamed.err, streamed.err)
    }

    @Test
    fun `options reach the model`() {
        val reference = Reference.of("sample-int4")
        val sampled = reference.case("sampled-kernel")
        val ids = sampled.promptIds.joinToString(",")
        val options = "--engine kernel --temperature 0.9 --top-k 40 --top-p 0.95 --min-p 0.01 --repetition-penalty 1.1 --seed 12345"
        val found = json(
            lesonnx("run", sample, "--prompt-ids", ids, *options.split(" ").toTypedArray(), "--threads", "2", "--max-tokens", "12", "--json"),
        )
        assertEquals(sampled.tokenIds.take(12), GoldenTraces.ints(found.getValue("tokens")).asList())
        val budget = reference.expertBudgetBytes.getValue("quarter")
        directory.resolve("prompt.txt").writeText("In the beginning")
        val file = directory.resolve("prompt.txt").toString()
        val small = "--expert-budget $budget --policy lru --no-lookahead --no-compute-first --loaders 2 --prefill-chunk 3 --max-tokens 3"
        val other = json(lesonnx("run", sample, "--prompt-file", file, *small.split(" ").toTypedArray(), "--json"))
        assertEquals(budget, other.getValue("expert_budget_bytes").jsonPrimitive.long)
        assertEquals(0, other.getValue("lookahead_loads").jsonPrimitive.long)
    }

    @Test
    fun `drafters give the same tokens, and what became of drafts is told`() {
        val case = Reference.of("sample-dspark-float").case("greedy-kernel")
        val bundle = Reference.bundle("sample-dspark-float").toString()
        val common = arrayOf("run", bundle, "--prompt", case.prompt!!, "--max-tokens", "${case.tokenIds.size}", "--threads=2")
        for (draft in listOf("none", "ngram", "dspark", "draft-model")) {
            val drafts = if (draft == "draft-model") arrayOf("--draft", draft, "--draft-model", bundle) else arrayOf("--draft", draft)
            val found = json(lesonnx(*common, *drafts, "--json"))
            assertEquals(case.tokenIds, GoldenTraces.ints(found.getValue("tokens")).asList(), draft)
            assertEquals(draft, found.getValue("draft").jsonPrimitive.content)
            if (draft == "none") assertEquals(JsonNull, found["drafts"]) else assertEquals(15, found.getValue("drafts").jsonObject.getValue("judged").jsonArray.size)
        }
        assertTrue("drafted tokens accepted" in lesonnx(*common, "--draft", "ngram").err)
    }

    @Test
    fun `pictures are read from files`() {
        val reference = Reference.of("minicpmv4_7-float")
        val bundle = Reference.bundle("minicpmv4_7-float").toString()
        val folder = TestData.data.resolve("checkpoints/minicpmv4_7_moe")
        for (case in reference.vision) {
            val images = case.files.flatMap { listOf("--image", folder.resolve(it).toString()) }.toTypedArray()
            val common = arrayOf("run", bundle, "--prompt", case.prompt, *images, "--engine", "kernel", "--threads", "2", "--ignore-eos", "--max-tokens", "24")
            val found = json(lesonnx(*common, "--json"))
            assertEquals(case.tokenIds, GoldenTraces.ints(found.getValue("tokens")).asList())
            assertEquals(case.files.size.toLong(), found.getValue("pictures").jsonPrimitive.long)
            assertEquals(case.featuresShape[0].toLong(), found.getValue("image_tokens").jsonPrimitive.long)
        }
        val picture = folder.resolve("images/small.png").toString()
        val inFront = lesonnx("run", bundle, "--prompt", "What is it?", "--image", picture, "--max-tokens", "2")
        assertTrue("1 picture of 4 tokens read in" in inFront.err, inFront.err)
        for ((arguments, message) in mapOf(
            listOf(sample, "--prompt", "x", "--image", picture) to "this bundle has no eyes: it takes no pictures",
            listOf(bundle, "--prompt", "x", "--image", "/nowhere.png") to "/nowhere.png: no such file",
            listOf(bundle, "--prompt", "<|image_pad|><|image_pad|>", "--image", picture) to "2 placeholders '<|image_pad|>' for 1 picture, expected one a picture",
            listOf(bundle, "--prompt-ids", "5,6", "--image", picture) to "hold the image token 373 0 times",
        )) {
            val outcome = lesonnx("run", *arguments.toTypedArray())
            assertEquals(2 to 1, outcome.code to outcome.err.trim().lines().size, outcome.err)
            assertTrue(message in outcome.err, outcome.err)
        }
    }

    @Test
    fun `every error is one line and a code`() {
        val binary = directory.resolve("binary").also { it.writeBytes(byteArrayOf(-1, -2)) }.toString()
        val cases = mapOf(
            listOf("magic") to "no such command 'magic'",
            listOf("run") to "missing argument BUNDLE",
            listOf("run", sample) to "exactly one of --prompt, --prompt-file and --prompt-ids",
            listOf("run", sample, "--prompt", "x", "--prompt-ids", "5") to "exactly one of --prompt",
            listOf("run", "surplus", sample, "--prompt", "x") to "surplus argument",
            listOf("run", sample, "--prompt") to "--prompt requires an argument",
            listOf("run", sample, "--prompt", "x", "--json=1") to "--json takes no value",
            listOf("run", sample, "--prompt", "x", "--magic") to "no such option: --magic",
            listOf("run", sample, "--prompt", "x", "--lookahead", "--no-lookahead") to "exclude each other",
            listOf("run", sample, "--prompt", "") to "the prompt is empty",
            listOf("run", sample, "--prompt-ids", "1,two") to "--prompt-ids '1,two' is not a list",
            listOf("run", sample, "--prompt-ids", "5,2048") to "token id 2048 is outside 0..2047",
            listOf("run", sample, "--prompt-file", "/nowhere") to "/nowhere: not readable",
            listOf("run", sample, "--prompt-file", binary) to "not UTF-8",
            listOf("run", sample, "--prompt", "x", "--expert-budget", "many") to "--expert-budget: 'many' is not a size",
            listOf("run", sample, "--prompt", "x", "--expert-budget", "4096") to "at least",
            listOf("run", sample, "--prompt", "x", "--schedule", "magic") to "schedule 'magic' is not one of",
            listOf("run", sample, "--prompt", "x", "--engine", "magic") to "engine 'magic' is not one of",
            listOf("run", sample, "--prompt", "x", "--draft", "magic") to "drafter 'magic' is not one of none, ngram, draft-model, dspark, mtp",
            listOf("run", sample, "--prompt", "x", "--draft", "draft-model") to "needs the bundle that drafts: give --draft-model BUNDLE",
            listOf("run", sample, "--prompt", "x", "--draft-model", sample) to "a draft model was given, but the drafter is none: expected draft-model",
            listOf("run", sample, "--prompt", "x", "--draft", "draft-model", "--draft-model", "/nowhere") to "/nowhere: no such bundle directory",
            listOf("run", sample, "--prompt", "x", "--draft", "dspark") to "this bundle has no dspark drafter; export with --drafter CHECKPOINT",
            listOf("run", sample, "--prompt", "x", "--draft", "mtp") to "this bundle has no mtp drafter",
            listOf("run", sample, "--prompt", "x", "--threads", "two") to "--threads is 'two', expected a whole number",
            listOf("run", sample, "--prompt", "x", "--threads", "0") to "expected 1 to 256",
            listOf("run", sample, "--prompt", "x", "--max-tokens", "0") to "expected at least 1",
            listOf("run", sample, "--prompt", "x", "--temperature", "NaN") to "temperature is NaN",
            listOf("run", sample, "--prompt", "x", "--seed", "-1") to "--seed is '-1'",
            listOf("run", sample, "--prompt", "x", "--stop", "") to "a stop string is empty",
            listOf("run", "$directory", "--prompt", "x") to "holds no manifest.json",
            listOf("run", "nul\u0000", "--prompt", "x") to "is not a path",
        )
        for ((arguments, message) in cases) {
            val outcome = lesonnx(*arguments.toTypedArray())
            assertEquals(2, outcome.code, outcome.err)
            assertEquals("", outcome.out)
            assertTrue(outcome.err.startsWith("error: ") && message in outcome.err, "'$message' in '${outcome.err}'")
            assertEquals(1, outcome.err.trim().lines().size, outcome.err)
        }
    }

    @Test
    fun `help is help`() {
        for (arguments in listOf(arrayOf(), arrayOf("--help"), arrayOf("run", "--help"))) {
            val outcome = lesonnx(*arguments)
            assertEquals(0, outcome.code)
            assertTrue("--expert-budget SIZE" in outcome.out)
        }
    }

    @Test
    fun `sizes are written and read as in Python`() {
        val sizes = mapOf("4096" to 4096L, "3GB" to 3_000_000_000, "2GiB" to (2L shl 30), " 1.5M " to 1_500_000, "7 kb" to 7000, "2tib" to (2L shl 40))
        for ((text, size) in sizes) assertEquals(size, parseBytes(text))
        for (text in listOf("", "many", "-3GB", "3XB", "1e9", "9999999999GB")) assertFailsWith<InputError> { parseBytes(text) }
        val shown = mapOf(999L to "999 B", 1_670_000L to "1.67 MB", 12_902_400L to "12.9 MB", 999_600L to "1.00 MB", (3L shl 40) to "3.30 TB")
        for ((size, text) in shown) assertEquals(text, formatBytes(size))
    }
}
