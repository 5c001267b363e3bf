package dev.lesonnx

import org.junit.jupiter.api.Test
import java.nio.file.Path
import java.util.concurrent.TimeUnit
import kotlin.test.assertEquals
import kotlin.test.assertTrue

/** The command line as a process of its own: what happens to the process is part of the matter. */
class CommandLineTest {
    @Test
    fun `a prompt may be as long as an argument can be`() {
        // ONNX Runtime 1.29 reads the command line, and without room for that the process ends without a word.
        val ids = List(1500) { 3 + it * 37 % 2000 }.joinToString(",").padEnd(100_000, ' ')
        val process = start("--prompt-ids", ids, "--max-tokens", "1", "--ignore-eos", "--json")
        val output = process.inputStream.bufferedReader().readText()
        assertTrue(process.waitFor(1, TimeUnit.MINUTES))
        assertEquals(0, process.exitValue(), output.take(500))
    }

    @Test
    fun `broken off it ends at once, and quietly`() {
        val process = start("--prompt-ids", "1,2,3", "--max-tokens", "2000", "--ignore-eos", "--schedule", "on-demand")
        // The first text is out: it is amid its steps.
        assertTrue(process.inputStream.read() >= 0)
        process.toHandle().destroy()
        val rest = process.inputStream.bufferedReader().readText()
        assertEquals(143, process.waitFor(), rest.takeLast(500))
    }

    private fun start(vararg arguments: String): Process {
        val java = Path.of(System.getProperty("java.home"), "bin", "java").toString()
        val classes = System.getProperty("surefire.test.class.path") ?: System.getProperty("java.class.path")
        val command = listOf(java, "-cp", classes, "dev.lesonnx.jvm.MainKt", "run", Reference.bundle("sample-int4").toString())
        return ProcessBuilder(command + arguments).redirectErrorStream(true).start()
    }
}
