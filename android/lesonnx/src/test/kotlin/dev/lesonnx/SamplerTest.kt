package dev.lesonnx

import kotlin.random.Random
import kotlin.test.assertContentEquals
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertIs
import kotlin.test.assertTrue
import kotlinx.serialization.json.JsonNull
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.double
import kotlinx.serialization.json.int
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import kotlinx.serialization.json.jsonPrimitive
import kotlinx.serialization.json.long
import org.junit.jupiter.api.Test

/** Sampling: golden vectors bit for bit, every filter against a plain reference, and the errors. */
internal class SamplerTest {
    private val golden = TestData.json(TestData.data.resolve("sampling.json")).jsonObject

    @Test
    fun `pcg32 is the published generator`() {
        for (record in golden.getValue("pcg32").jsonArray.map { it.jsonObject }) {
            val outputs = record.getValue("outputs").jsonArray.map { it.jsonPrimitive.long.toUInt() }
            val random = Pcg32(record.getValue("seed").jsonPrimitive.content.toULong(), record.long("stream"))
            assertEquals(outputs, outputs.map { random.nextBits() })
        }
    }

    @Test
    fun `exp gives the golden bits`() {
        for (pair in golden.getValue("exp").jsonArray.map { it.jsonArray }) {
            val x = pair[0].jsonPrimitive.double
            assertEquals(pair[1].jsonPrimitive.double.toRawBits(), expNonPositive(x).toRawBits(), "exp($x)")
        }
    }

    @Test
    fun `golden cases`() {
        for (case in golden.getValue("cases").jsonArray.map { it.jsonObject }) {
            val name = case.getValue("name").jsonPrimitive.content
            val sampler = Sampler(options(case.getValue("options").jsonObject))
            sampler.acceptAll(GoldenTraces.ints(case.getValue("accept")))
            val random = case["logits_seed"]?.let { Pcg32(it.jsonPrimitive.content.toULong(), 1) }
            for ((number, step) in case.getValue("steps").jsonArray.map { it.jsonObject }.withIndex()) {
                val logits = if (random == null) {
                    val values = step.getValue("logits").jsonArray
                    FloatArray(values.size) {
                        if (values[it] is JsonNull) Float.NEGATIVE_INFINITY else values[it].jsonPrimitive.double.toFloat()
                    }
                } else {
                    FloatArray(case.getValue("vocab_size").jsonPrimitive.int) { (random.nextBits() shr 17).toInt() / 2048f - 8 }
                }
                if ("ids" in step) {
                    val distribution = sampler.distribution(logits)
                    assertContentEquals(GoldenTraces.ints(step.getValue("ids")), distribution.ids, "$name $number")
                    val expected = step.getValue("probabilities").jsonArray.map { it.jsonPrimitive.double }
                    assertEquals(expected, distribution.probabilities.asList(), "$name $number")
                }
                val token = sampler.sample(logits)
                assertEquals(step.getValue("token").jsonPrimitive.int, token, "$name $number")
                sampler.accept(token)
            }
        }
    }

    private fun options(json: JsonObject) = SamplingOptions(
        json.double("temperature"),
        json.getValue("top_k").jsonPrimitive.int,
        json.double("top_p"),
        json.double("min_p"),
        json.double("repetition_penalty"),
        json.getValue("seed").jsonPrimitive.content.toULong(),
    )

    private fun JsonObject.double(key: String): Double = getValue(key).jsonPrimitive.double

    private fun JsonObject.long(key: String): Long = getValue(key).jsonPrimitive.long

    /** Steps 1 to 7 word by word, with a plain sort; the token drawn and what it was drawn from. */
    private fun reference(logits: FloatArray, options: SamplingOptions, seen: Set<Int>): Pair<Int, List<Int>> {
        val scores = logits.mapIndexed { token, value ->
            val wide = value.toDouble()
            val penalty = options.repetitionPenalty
            val penalised = if (token !in seen) wide else if (wide > 0) wide / penalty else wide * penalty
            penalised.toFloat() + 0f
        }
        var order = scores.indices.sortedWith(compareBy<Int> { -scores[it] }.thenBy { it })
        val weight = scores.map { expNonPositive((it.toDouble() - scores.max().toDouble()) / options.temperature) }
        fun sum(tokens: List<Int>) = tokens.fold(0.0) { running, token -> running + weight[token] }
        var total = sum(scores.indices.toList())
        val isFiltered = options.topK in 1 until scores.size || options.topP < 1 || options.minP > 0
        if (options.topK in 1 until scores.size) {
            order = order.take(options.topK)
            total = sum(order)
        }
        if (options.topP < 1) {
            order = (1..order.size).map(order::take).firstOrNull { sum(it) >= options.topP * total } ?: order
        }
        order = order.takeWhile { weight[it] >= options.minP && weight[it] > 0 }
        val target = Pcg32(options.seed).uniform() * if (isFiltered) sum(order) else total
        val drawn = order.indices.firstOrNull { sum(order.take(it + 1)) > target }?.let { order[it] } ?: order.last()
        return drawn to order
    }

    @Test
    fun `distribution and sample are their definition`() {
        val random = Random(5)
        repeat(1500) { number ->
            val logits = FloatArray(random.nextInt(1, 330)) {
                if (random.nextInt(6) > 0) random.nextFloat() * 60 - 30
                else floatArrayOf(0f, -0f, 1f, Float.NEGATIVE_INFINITY).random(random)
            }
            logits[random.nextInt(logits.size)] = random.nextFloat()
            val options = SamplingOptions(
                listOf(1e-300, 0.01, 0.7, 1.0, 2.5).random(random),
                listOf(0, 1, 3, 8, 270, 1000).random(random),
                listOf(1.0, 0.999, 0.9, 0.5, 1e-9).random(random),
                listOf(0.0, 1e-6, 0.1, 1.0).random(random),
                listOf(1.0, 1.3, 0.8).random(random),
                random.nextLong().toULong(),
            )
            val seen = List(random.nextInt(20)) { random.nextInt(400) }.toSet()
            val before = logits.copyOf()
            val sampler = Sampler(options)
            sampler.acceptAll(seen.toIntArray())
            val (drawn, order) = reference(logits, options, seen)
            val distribution = sampler.distribution(logits)
            assertEquals(order, distribution.ids.asList(), "run $number: $options")
            assertEquals(1.0, distribution.probabilities.sum(), 1e-12)
            assertEquals(drawn, sampler.sample(logits), "run $number: $options")
            assertContentEquals(before, logits)
        }
    }

    @Test
    fun `long vocabularies with many ties`() {
        for (size in listOf(255, 256, 257, 5000)) {
            val random = Random(size)
            val logits = FloatArray(size) { random.nextInt(-4, 4) / 2f }
            val order = logits.indices.sortedWith(compareBy<Int> { -logits[it] }.thenBy { it })
            val options = SamplingOptions(temperature = 1.3)
            for (chosen in listOf(
                options.copy(topP = 0.97), options.copy(minP = 0.05), options.copy(topK = 200), options.copy(topK = 200, topP = 0.5), options,
            )) {
                val ids = Sampler(chosen).distribution(logits).ids.asList()
                assertEquals(order.take(ids.size), ids)
                if (chosen == options.copy(topK = 200)) assertEquals(200, ids.size)
                assertTrue(Sampler(chosen).sample(logits) in ids)
            }
        }
    }

    @Test
    fun `greedy takes the lowest id and draws nothing`() {
        val sampler = Sampler(SamplingOptions(seed = 5u))
        assertEquals(1, sampler.sample(floatArrayOf(1f, 3f, 3f, -2f)))
        assertEquals(0, sampler.sample(floatArrayOf(-0f, 0f)))
        assertEquals(Pcg32(5u).nextBits(), sampler.random.nextBits())
    }

    @Test
    fun `repetition penalty divides positive and multiplies negative`() {
        val sampler = Sampler(SamplingOptions(repetitionPenalty = 2.0))
        sampler.acceptAll(intArrayOf(0, 0, 7)) // 7 is beyond the vocabulary and harms nobody
        assertEquals(1, sampler.sample(floatArrayOf(3f, 2f)))
        assertEquals(1, sampler.sample(floatArrayOf(-1f, -1.5f)))
        sampler.retract(0)
        assertEquals(1, sampler.sample(floatArrayOf(3f, 2f)))
        sampler.retract(0)
        assertEquals(0, sampler.sample(floatArrayOf(3f, 2f)))
        val error = assertFailsWith<InputError> { sampler.retract(0) }
        assertEquals("token 0 was never accepted, so it cannot be taken back", error.message)
        assertFailsWith<InputError> { sampler.accept(-1) }
    }

    @Test
    fun `bad options are named`() {
        val bad = mapOf<String, () -> SamplingOptions>(
            "temperature is -0.1, expected at least 0" to { SamplingOptions(temperature = -0.1) },
            "temperature is NaN, expected a finite number" to { SamplingOptions(temperature = Double.NaN) },
            "topK is -1, expected at least 0 (0 is off)" to { SamplingOptions(topK = -1) },
            "topP is 0.0, expected above 0 and at most 1 (1 is off)" to { SamplingOptions(topP = 0.0) },
            "topP is Infinity, expected a finite number" to { SamplingOptions(topP = Double.POSITIVE_INFINITY) },
            "minP is 2.0, expected from 0 (off) to 1" to { SamplingOptions(minP = 2.0) },
            "repetitionPenalty is 0.0, expected above 0 (1 is off)" to { SamplingOptions(repetitionPenalty = 0.0) },
        )
        for ((message, make) in bad) assertEquals(message, assertFailsWith<InputError> { make() }.message)
    }

    @Test
    fun `broken logits are refused`() {
        for (temperature in listOf(0.0, 1.0)) {
            for ((values, word) in listOf(
                floatArrayOf(1f, Float.NaN) to "NaN",
                floatArrayOf(1f, Float.POSITIVE_INFINITY) to "+inf",
                floatArrayOf(Float.NEGATIVE_INFINITY) to "but -inf",
            )) {
                val error = assertFailsWith<LesonnxError> { Sampler(SamplingOptions(temperature)).sample(values) }
                assertTrue(word in error.message!!)
                assertEquals(LesonnxError::class, error::class)
            }
        }
        assertIs<InputError>(assertFailsWith<LesonnxError> { Sampler(SamplingOptions()).sample(FloatArray(0)) })
    }
}
