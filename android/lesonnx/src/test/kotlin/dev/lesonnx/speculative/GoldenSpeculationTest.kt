package dev.lesonnx.speculative

import dev.lesonnx.GoldenTraces
import dev.lesonnx.IntList
import dev.lesonnx.Pcg32
import dev.lesonnx.Sampler
import dev.lesonnx.SamplingOptions
import dev.lesonnx.TestData
import kotlin.test.assertContentEquals
import kotlin.test.assertEquals
import kotlin.test.assertTrue
import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonNull
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.boolean
import kotlinx.serialization.json.double
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import kotlinx.serialization.json.jsonPrimitive
import org.junit.jupiter.api.Test

/** The Kotlin speculator proposes, draws, verifies and prices as the Python one wrote down, number by number. */
internal class GoldenSpeculationTest {
    private val golden = TestData.json(TestData.data.resolve("speculation.json")).jsonObject
    private val vocabSize = golden.getValue("vocab_size").int

    private fun cases(name: String): List<JsonObject> = golden.getValue(name).jsonArray.map { it.jsonObject }.also { assertTrue(it.isNotEmpty()) }

    private fun logits(random: Pcg32) = FloatArray(vocabSize) { (random.nextBits() shr 17).toInt() / 2048f - 8 }

    private fun sampler(case: JsonObject): Sampler {
        val options = case.getValue("options").jsonObject
        fun double(name: String, otherwise: Double) = options[name]?.jsonPrimitive?.double ?: otherwise
        val sampler = Sampler(
            SamplingOptions(
                temperature = double("temperature", 0.0),
                topK = options["top_k"]?.int ?: 0,
                topP = double("top_p", 1.0),
                minP = double("min_p", 0.0),
                repetitionPenalty = double("repetition_penalty", 1.0),
                seed = options["seed"]?.jsonPrimitive?.content?.toULong() ?: 0u,
            ),
        )
        sampler.acceptAll(ints(case.getValue("accept")))
        return sampler
    }

    @Test
    fun `prompt lookup proposes the same tokens, as sure of them`() {
        for (case in cases("ngram")) {
            val drafter = NgramDrafter()
            var sequence = IntList()
            for ((number, call) in case.getValue("calls").jsonArray.map { it.jsonObject }.withIndex()) {
                call["rewind"]?.int?.let { kept ->
                    val whole = sequence
                    sequence = IntList().also { for (place in 0 until kept) it.add(whole[place]) }
                    drafter.rewind(kept)
                }
                ints(call.getValue("tokens")).forEach(sequence::add)
                val draft = drafter.propose(sequence, call.getValue("max_tokens").int, DraftSampler(Sampler(SamplingOptions())))
                val what = "${case.getValue("name")} $number"
                assertContentEquals(ints(call.getValue("draft")), draft.tokenIds, what)
                assertContentEquals(ints(call.getValue("confidence")), draft.confidence ?: IntArray(0), what)
            }
        }
    }

    @Test
    fun `drafts are drawn by numbers of their own, and leave the sampler as it was`() {
        for (case in cases("draft_sampler")) {
            val sampler = sampler(case)
            val draftSampler = DraftSampler(sampler)
            val random = Pcg32(case.getValue("logits_seed").jsonPrimitive.content.toULong(), LOGITS_STREAM)
            for (expected in case.getValue("drafts").jsonArray.map(::ints)) {
                val tokens = IntArray(expected.size)
                draftSampler.proposal { choose -> for (slot in tokens.indices) tokens[slot] = choose(logits(random)).token }
                assertContentEquals(expected, tokens, "${case.getValue("name")}")
            }
            assertEquals(case.getValue("then").int, sampler.sample(logits(random)))
        }
    }

    @Test
    fun `the same drafts stay, and the same token follows`() {
        for (case in cases("verify")) {
            val sampler = sampler(case)
            val random = Pcg32(case.getValue("logits_seed").jsonPrimitive.content.toULong(), LOGITS_STREAM)
            val drafted = ints(case.getValue("draft"))
            val rows = List(drafted.size + 1) { logits(random) }
            val probabilities = case.getValue("probabilities").takeIf { it !is JsonNull }?.jsonArray?.map { pair ->
                Sampler.Distribution(ints(pair.jsonArray[0]), pair.jsonArray[1].jsonArray.map { it.jsonPrimitive.double }.toDoubleArray())
            }
            val found = verify(Draft(drafted, probabilities), rows, sampler, ints(case.getValue("ends")).toSet())
            val what = "${case.getValue("name")}"
            assertContentEquals(ints(case.getValue("token_ids")), found.tokenIds, what)
            assertEquals(case.getValue("accepted").int, found.accepted, what)
            assertEquals(case.getValue("next_u32").long.toUInt(), sampler.random.nextBits(), what)
        }
    }

    @Test
    fun `lengths are chosen by the same arithmetic`() {
        for (case in cases("pricing")) {
            val pricing = Pricing()
            val isFree = case.getValue("is_free").jsonPrimitive.boolean
            val isDrawn = case.getValue("is_drawn").jsonPrimitive.boolean
            for ((number, turn) in case.getValue("turns").jsonArray.map { it.jsonObject }.withIndex()) {
                val what = "${case.getValue("name")} $number"
                val newBytes = longs(turn.getValue("new_bytes"))
                assertEquals(turn.getValue("may_draft").jsonPrimitive.boolean, pricing.mayDraft, what)
                assertEquals(turn.getValue("asked").int, pricing.ask(turn.getValue("most").int, isFree, newBytes), what)
                val confidence = turn.getValue("confidence").takeIf { it !is JsonNull }?.let(::ints)
                val chosen = pricing.choose(turn.getValue("drafted").int, confidence, isFree, isDrawn, newBytes)
                assertEquals(turn.getValue("chosen").int, chosen, what)
                pricing.passed(
                    chosen + 1,
                    turn.getValue("pass_us").long,
                    turn.getValue("stall_us").long,
                    turn.getValue("read_bytes").long,
                    newBytes,
                    turn.getValue("new_tokens").int,
                    turn.getValue("draft_us").takeIf { it !is JsonNull }?.long,
                )
                val judged = turn.getValue("judged").int
                if (judged > 0) pricing.judge(judged, turn.getValue("accepted").int, confidence)
                val (slot, odds) = ints(turn.getValue("odds"))
                assertEquals(odds, pricing.acceptance.odds(slot, null), what)
                val (bin, confident) = ints(turn.getValue("confidence_odds"))
                assertEquals(confident, pricing.acceptance.odds(0, intArrayOf(bin)), what)
                val (rows, extra, us) = longs(turn.getValue("expected_us"))
                assertEquals(us, pricing.times.passUs(rows.toInt(), extra), what)
            }
        }
    }

    @Test
    fun `a pass's further rows are expected to read the same bytes`() {
        for (case in cases("new_bytes")) {
            val trace = TestData.json(TestData.data.resolve("traces").resolve(case.getValue("trace").jsonPrimitive.content)).jsonObject
            val scheduler = GoldenTraces.makeScheduler(trace)
            for (event in trace.getValue("events").jsonArray) GoldenTraces.answer(scheduler, event.jsonObject)
            val found = scheduler.expectedNewBytes(case.getValue("rows").int)
            assertContentEquals(longs(case.getValue("result")), found, "${case.getValue("trace")}")
        }
    }

    private companion object {
        const val LOGITS_STREAM = 1L

        fun ints(json: JsonElement): IntArray = GoldenTraces.ints(json)

        fun longs(json: JsonElement): LongArray = json.jsonArray.map { it.long }.toLongArray()

        val JsonElement.int: Int get() = jsonPrimitive.content.toInt()
        val JsonElement.long: Long get() = jsonPrimitive.content.toLong()
    }
}
