package dev.lesonnx

import kotlin.random.Random
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertFalse
import kotlin.test.assertTrue
import org.junit.jupiter.api.Test

/** Text that grows token by token, and stop strings. */
internal class TextStreamTest {
    /** A tokenizer whose tokens are bytes: decoding is UTF-8, as for byte-level tokenizers. 256 is a special token. */
    private class ByteTokens : TokenTexts {
        var longestWindow = 0

        override fun decode(ids: IntArray, skipSpecialTokens: Boolean): String {
            longestWindow = maxOf(longestWindow, ids.size)
            return ids.filter { it < 256 }.map { it.toByte() }.toByteArray().decodeToString()
        }

        override fun isSilent(token: Int): Boolean = token >= 256
    }

    private fun bytes(text: String): IntArray = text.encodeToByteArray().map { it.toInt() and 0xFF }.toIntArray()

    private fun streamed(ids: IntArray): List<String> {
        val decoder = StreamDecoder(ByteTokens())
        return ids.map(decoder::push) + decoder.flush()
    }

    @Test
    fun `the pieces are the whole and end at characters`() {
        for (text in listOf("", "In the beginning", "日本 👍🏽 é\u0301a", "\uFFFD\uFFFDa\uFFFD", "𒀀".repeat(20))) {
            val pieces = streamed(bytes(text))
            assertEquals(text, pieces.joinToString(""))
            if ('\uFFFD' !in text) assertFalse(pieces.any { '\uFFFD' in it || it.lastOrNull()?.isHighSurrogate() == true })
        }
        assertEquals(listOf("", "", "", "𒀀", ""), streamed(bytes("𒀀")))
    }

    @Test
    fun `any bytes stream`() {
        val random = Random(3)
        repeat(2000) {
            val ids = IntArray(random.nextInt(100)) { if (random.nextBoolean()) random.nextInt(257) else random.nextInt(0xF0, 0x100) }
            assertEquals(ByteTokens().decode(ids), streamed(ids).joinToString(""))
        }
    }

    @Test
    fun `a step decodes a short window`() {
        val tokens = ByteTokens()
        val decoder = StreamDecoder(tokens)
        for (id in bytes("The experts of a layer 👍 ".repeat(20)) + IntArray(500) { 0xFF } + bytes("the end")) decoder.push(id)
        assertTrue(tokens.longestWindow <= 64, "${tokens.longestWindow} tokens")
    }

    @Test
    fun `flush shows broken bytes and starts anew`() {
        val decoder = StreamDecoder(ByteTokens())
        assertEquals("", decoder.push(0xF0))
        assertEquals("\uFFFD", decoder.flush())
        assertEquals("", decoder.flush())
        assertEquals("T", decoder.push('T'.code))
    }

    private fun stopped(stops: List<String>, vararg pieces: String): Pair<List<String>, String?> {
        val checker = StopChecker(stops)
        return pieces.map(checker::push) + checker.flush() to checker.stoppedBy
    }

    @Test
    fun `a stop across borders`() {
        val (pieces, stop) = stopped(listOf("</end>"), "Hello ", "wor", "ld<", "/e", "nd", ">more")
        assertEquals(listOf("Hello ", "wor", "ld", "", "", "", ""), pieces)
        assertEquals("</end>", stop)
    }

    @Test
    fun `what only looked like a stop comes later`() {
        val expected = listOf("a", "", "\n\nUse you", "", "\n") to null
        assertEquals(expected, stopped(listOf("\n\nUser:"), "a\n", "\nU", "se you", "\n"))
        assertEquals(listOf("", "aa", "", "") to "aab", stopped(listOf("aab"), "aa", "aa", "b!"))
    }

    @Test
    fun `the stop that is complete first counts`() {
        for (pieces in listOf(arrayOf("abcd"), arrayOf("a", "b", "c", "d"), arrayOf("abc", "d"))) {
            val (shown, stop) = stopped(listOf("abcd", "bc"), *pieces)
            assertEquals("a" to "bc", shown.joinToString("") to stop)
        }
        assertEquals(listOf("a", "") to "bc", stopped(listOf("c", "bc"), "abc"))
        assertFailsWith<InputError> { StopChecker(listOf("a", "")) }
    }

    @Test
    fun `borders do not matter`() {
        val random = Random(4)
        fun text(length: Int) = String(CharArray(length) { "ab<".random(random) })
        repeat(3000) {
            val whole = text(random.nextInt(30))
            val stops = List(random.nextInt(4)) { text(random.nextInt(1, 5)) }
            val borders = (List(random.nextInt(6)) { random.nextInt(whole.length + 1) } + 0 + whole.length).sorted()
            val pieces = borders.zipWithNext { from, to -> whole.substring(from, to) }.toTypedArray()
            val (shown, stop) = stopped(stops, *pieces)
            val first = stops.filter { it in whole }
                .minWithOrNull(compareBy({ whole.indexOf(it) + it.length }, { whole.indexOf(it) }))
            assertEquals(first, stop)
            assertEquals(if (first == null) whole else whole.substringBefore(first), shown.joinToString(""))
        }
    }
}
