package dev.lesonnx

import java.nio.file.Files
import java.nio.file.Path
import kotlin.io.path.createSymbolicLinkPointingTo
import kotlin.io.path.deleteExisting
import kotlin.io.path.fileSize
import kotlin.io.path.isRegularFile
import kotlin.io.path.moveTo
import kotlin.io.path.name
import kotlin.io.path.readBytes
import kotlin.io.path.readText
import kotlin.io.path.walk
import kotlin.io.path.writeBytes
import kotlin.io.path.writeText
import kotlin.random.Random
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertFalse
import kotlin.test.assertTrue
import org.junit.jupiter.api.BeforeEach
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir

/** A bundle on disk: what opening checks, and that verifying finds any change at all. */
internal class BundleTest {
    @TempDir
    lateinit var directory: Path

    private lateinit var copy: Path

    @BeforeEach
    fun copyBundle() {
        copy = directory.resolve("bundle")
        TestData.mobile.resolve("bundles/qwen2_moe-int4").toFile().copyRecursively(copy.toFile())
    }

    private fun files(): List<Path> = copy.walk().filter { it.isRegularFile() }.sorted().toList()

    private fun problem(run: () -> Unit): String {
        val message = assertFailsWith<BundleError> { run() }.message!!
        assertFalse('\n' in message, message)
        return message
    }

    private fun assertSays(expected: String, message: String) = assertTrue(expected in message, "'$expected' in '$message'")

    @Test
    fun `a fresh bundle is whole`() {
        var bytes = 0L
        assertEquals(files().size - 1, Bundle(copy).verify { bytes += it })
        assertEquals(files().filter { it.name != "checksums.json" }.sumOf { it.fileSize() }, bytes)
    }

    @Test
    fun `experts and sizes`() {
        val bundle = Bundle(copy)
        val model = bundle.manifest.model
        val perLayer = model.numExperts + 1
        val layers = bundle.manifest.expertLayers
        assertEquals((0 until layers.size * perLayer).toList(), bundle.experts.map { it.number })
        assertEquals((0 until model.numExperts).toList() + null, bundle.experts.take(perLayer).map { it.expertIdx })
        for (layer in layers) {
            var end = 0L
            for (expert in bundle.experts.filter { it.layerIdx == layer.layerIdx }) {
                assertEquals(end, expert.offsetBytes)
                end += expert.costBytes
                assertTrue(bundle.modelFile(expert).isRegularFile())
            }
            assertEquals(end, bundle.packBytes(layer))
            assertEquals(end, bundle.packFile(layer.layerIdx).fileSize())
        }
        assertEquals(bundle.experts.sumOf { it.costBytes }, bundle.expertBytes)
        val (routed, shared) = bundle.experts[0].costBytes to bundle.experts[model.numExperts].costBytes
        assertEquals(model.numExpertsPerTok * routed + shared, bundle.leastBudgetBytes)
        assertEquals(layers.size * bundle.leastBudgetBytes, bundle.tokenDemandBytes)
        assertEquals("layer 0 shared expert", bundle.experts[model.numExperts].toString())
    }

    @Test
    fun `any flipped bit is found`() {
        val random = Random(1)
        repeat(60) {
            val path = files().random(random)
            val content = path.readBytes()
            val changed = content.copyOf()
            val place = random.nextInt(content.size)
            changed[place] = (changed[place].toInt() xor (1 shl random.nextInt(8))).toByte()
            path.writeBytes(changed)
            problem { Bundle(copy).verify() }
            path.writeBytes(content)
        }
        Bundle(copy).verify()
    }

    @Test
    fun `any truncation, growth or absence is found`() {
        for (path in files()) {
            val content = path.readBytes()
            for (changed in listOf(content.copyOf(content.size - 1), content.copyOf(content.size / 2), ByteArray(0), content + 0)) {
                path.writeBytes(changed)
                assertSays(copy.toString(), problem { Bundle(copy).verify() })
            }
            path.deleteExisting()
            val message = problem { Bundle(copy).verify() }
            assertTrue("missing" in message || "holds no manifest.json" in message, message)
            path.writeBytes(content)
        }
    }

    @Test
    fun `any extra file or link is found`() {
        for (name in listOf("extra.bin", "dense/.hidden", "experts/layer_000/expert_999.onnx")) {
            copy.resolve(name).writeText("")
            assertSays("$name: is not named in checksums.json", problem { Bundle(copy).verify() })
            copy.resolve(name).deleteExisting()
        }
        copy.resolve("elsewhere").createSymbolicLinkPointingTo(directory)
        assertSays("elsewhere: is not named", problem { Bundle(copy).verify() })
    }

    @Test
    fun `links out of the bundle are refused`() {
        val names = listOf(
            "dense/segment_001.onnx", "experts/stage_0.onnx", "experts/layer_001/experts.pack",
            "experts/layer_001/expert_003.onnx", "experts/layer_001/shared.onnx", "dense", "experts", "manifest.json",
        )
        for (name in names) {
            val path = copy.resolve(name)
            val aside = path.moveTo(directory.resolve("aside"))
            path.createSymbolicLinkPointingTo(aside)
            assertSays("leads out of the bundle", problem { Bundle(copy) })
            path.deleteExisting()
            path.createSymbolicLinkPointingTo(path)
            problem { Bundle(copy) }
            path.deleteExisting()
            aside.moveTo(path)
        }
        directory.resolve("link").createSymbolicLinkPointingTo(copy)
        Bundle(directory.resolve("link")).verify()
    }

    @Test
    fun `what is no bundle`() {
        assertSays("no such bundle directory", problem { Bundle(directory.resolve("nothing")) })
        assertSays("holds no manifest.json", problem { Bundle(directory) })
        val manifest = directory.resolve("manifest.json")
        for (content in listOf(byteArrayOf(-1, -2), "{}".toByteArray(), ByteArray(0))) {
            manifest.writeBytes(content)
            assertSays("manifest.json", problem { Bundle(directory) })
        }
        manifest.deleteExisting()
        Files.createDirectory(manifest)
        assertSays("manifest.json: missing from the bundle", problem { Bundle(directory) })
    }

    @Test
    fun `a pack of another length`() {
        val pack = copy.resolve("experts/layer_001/experts.pack")
        pack.writeBytes(pack.readBytes().let { it.copyOf(it.size - PAGE_BYTES) })
        val message = problem { Bundle(copy) }
        assertTrue(Regex("experts.pack: has [\\d,]+ bytes, expected [\\d,]+; export again").containsMatchIn(message), message)
    }

    @Test
    fun `bad checksums`() {
        val path = copy.resolve("checksums.json")
        val text = path.readText()
        val entry = "{\"size_bytes\": 1, \"sha256\": \"${"0".repeat(64)}\"}"
        fun added(name: String) = text.replaceFirst(Regex("\"files\": ?\\{"), "\"files\": {\"$name\": $entry, ")
        val bad = listOf(
            "{", "[]", "", text.trimEnd(), text.replace("sha256\"", "md5\""), text.replaceFirst("{", "{\"extra\": 1, "),
            text.replaceFirst("\"size_bytes\"", "\"size\""), "{\"algorithm\": \"sha256\", \"files\": []}\n",
            added("../x"), added("/etc/hostname"), added("a\\u0000b"), added("x"), "[".repeat(100_000),
        )
        for (content in bad) {
            assertTrue(content != text)
            path.writeText(content)
            problem { Bundle(copy).verify() }
        }
    }
}
