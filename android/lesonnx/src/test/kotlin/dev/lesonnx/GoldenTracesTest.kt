package dev.lesonnx

import java.nio.FloatBuffer
import java.nio.file.Path
import kotlin.test.assertContentEquals
import kotlin.test.assertEquals
import kotlin.test.assertTrue
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import kotlinx.serialization.json.jsonPrimitive
import kotlinx.serialization.json.long
import org.junit.jupiter.api.Test
import org.junit.jupiter.params.ParameterizedTest
import org.junit.jupiter.params.provider.MethodSource

/** The Kotlin scheduler gives the actions that the Python one wrote, number by number. */
internal class GoldenTracesTest {
    @ParameterizedTest
    @MethodSource("traces")
    fun `a trace replays exactly`(path: Path) {
        val trace = TestData.json(path).jsonObject
        val scheduler = GoldenTraces.makeScheduler(trace)
        for ((number, event) in trace.getValue("events").jsonArray.withIndex()) {
            assertEquals(event, GoldenTraces.answer(scheduler, event.jsonObject), "event $number")
        }
        assertEquals(trace.getValue("end"), GoldenTraces.end(scheduler))
    }

    @Test
    fun `the traces cover every event and action`() {
        val seen = HashSet<String>()
        for (path in GoldenTraces.files) {
            for (event in TestData.json(path).jsonObject.getValue("events").jsonArray.map { it.jsonObject }) {
                seen.add(event.getValue("event").jsonPrimitive.content)
                if ("error" in event) seen.add("error")
                event["actions"]?.jsonArray?.forEach { seen.add(it.jsonArray[0].jsonPrimitive.content) }
            }
        }
        val events = "begin_step route predict loaded load_failed computed end_layer accept pressure"
        val expected = "$events load evict compute promote cancel error".split(" ")
        assertTrue(seen.containsAll(expected), "missing: ${expected - seen}")
    }

    @Test
    fun `scores become fixed point in one way`() {
        val vectors = TestData.json(TestData.data.resolve("fixed_scores.json")).jsonObject
        val bits = vectors.getValue("float32_bits").jsonArray.map { it.jsonPrimitive.long.toInt() }
        val scores = FloatArray(bits.size) { Float.fromBits(bits[it]) }
        assertContentEquals(GoldenTraces.ints(vectors.getValue("fixed")), fixedScores(FloatBuffer.wrap(scores)))
        val part = FloatBuffer.wrap(scores, 2, 3).slice()
        assertContentEquals(GoldenTraces.ints(vectors.getValue("fixed")).copyOfRange(2, 5), fixedScores(part))
    }

    companion object {
        @JvmStatic
        fun traces(): List<Path> = GoldenTraces.files
    }
}
