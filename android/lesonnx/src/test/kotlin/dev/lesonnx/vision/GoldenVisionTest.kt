package dev.lesonnx.vision

import dev.lesonnx.InputError
import dev.lesonnx.TestData
import dev.lesonnx.VisionKind
import dev.lesonnx.VisionRecord
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonArray
import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonNull
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.boolean
import kotlinx.serialization.json.decodeFromJsonElement
import kotlinx.serialization.json.int
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import kotlinx.serialization.json.jsonPrimitive
import org.junit.jupiter.api.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertFalse
import kotlin.test.assertTrue

/** The rules for pictures are Python's: `tests/data/vision.json` has what they give, and what they refuse. */
internal class GoldenVisionTest {
    private val document = TestData.json(TestData.data.resolve("vision.json")).jsonObject
    private val records = document.getValue("facts").jsonObject.mapValues { (_, facts) -> record(facts.jsonObject) }

    private fun record(facts: JsonObject): VisionRecord {
        fun size(key: String) = facts.getValue(key).jsonPrimitive.int
        return VisionRecord(
            VisionKind.MINICPMV,
            parts = emptyList(),
            data = "vision/vision.bin",
            size("patch_size"),
            size("token_patches"),
            size("scale_resolution"),
            size("max_slice_nums"),
            Json.decodeFromJsonElement(facts.getValue("tokens")),
            Json.decodeFromJsonElement(facts.getValue("texts")),
            numParameters = 1,
            workingBytes = 1,
        )
    }

    private fun cases(section: String): List<JsonObject> = document.getValue(section).jsonArray.map { it.jsonObject }.also { assertTrue(it.isNotEmpty()) }

    private fun recordOf(case: JsonObject) = records.getValue(case.getValue("facts").jsonPrimitive.content)

    private fun ints(element: JsonElement): List<Int> = element.jsonArray.map { it.jsonPrimitive.int }

    private fun viewsOf(case: JsonObject): List<List<View>> = case.getValue("pictures").jsonArray.map(::ints).map { Cutting(recordOf(case)).views(it[0], it[1]) }

    private fun isRefused(case: JsonObject) = case["refused"]?.jsonPrimitive?.boolean == true

    private fun assertRefused(work: () -> Unit) {
        val message = assertFailsWith<InputError>(block = work).message!!
        assertFalse('\n' in message, message)
    }

    @Test
    fun `pictures are cut as in Python`() {
        var count = 0
        for (case in cases("cutting")) {
            val cutting = Cutting(recordOf(case))
            for ((size, expected) in case.getValue("sizes").jsonArray.map(::ints) zip case.getValue("views").jsonArray) {
                count++
                if (expected == JsonNull) {
                    assertRefused { cutting.views(size[0], size[1]) }
                } else {
                    val found = cutting.views(size[0], size[1]).map { listOf(it.height, it.width, it.rows, it.columns) }
                    assertEquals((expected as JsonArray).map(::ints), found, "$size of ${case["facts"]}")
                }
            }
        }
        assertTrue(count > 100)
    }

    @Test
    fun `placeholders become Python's`() {
        for (case in cases("expanding")) {
            val placeholders = Placeholders(recordOf(case))
            val text = case.getValue("text").jsonPrimitive.content
            val views = viewsOf(case)
            if (isRefused(case)) assertRefused { placeholders.expand(text, views) }
            else assertEquals(case.getValue("expanded").jsonPrimitive.content, placeholders.expand(text, views))
        }
    }

    @Test
    fun `tokens are where Python has them`() {
        for (case in cases("positions")) {
            val canvas = Canvas(recordOf(case))
            val tokenIds = ints(case.getValue("token_ids")).toIntArray()
            val views = viewsOf(case)
            if (isRefused(case)) {
                assertRefused { canvas.place(tokenIds, views) }
                continue
            }
            val placed = canvas.place(tokenIds, views)
            assertEquals(case.getValue("positions").jsonArray.map(::ints), placed.positions.map { it.asList() })
            assertEquals(case.getValue("next").jsonPrimitive.int, placed.positions.maxOf { row -> row.maxOrNull() ?: -1 } + 1)
            assertEquals(views.map { own -> own.sumOf { it.numTokens(recordOf(case)) } }, placed.imagePlaces.map { it.size })
            val image = recordOf(case).tokens.image
            assertEquals(tokenIds.indices.filter { tokenIds[it] == image }, placed.imagePlaces.flatMap { it.asList() })
        }
    }
}
