package dev.lesonnx.store

import dev.lesonnx.BundleError
import dev.lesonnx.LesonnxError
import dev.lesonnx.TestData
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.runBlocking
import org.junit.jupiter.api.BeforeEach
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir
import java.io.ByteArrayInputStream
import java.io.ByteArrayOutputStream
import java.nio.file.Files
import java.nio.file.Path
import java.util.zip.ZipEntry
import java.util.zip.ZipOutputStream
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertNull
import kotlin.test.assertTrue

/** Bundles from folders and zips that a person picked. */
class BundleImporterTest {
    @TempDir
    lateinit var directory: Path
    private val origin: Path = TestData.mobile.resolve("bundles/qwen2_moe-int4")
    private lateinit var store: BundleStore

    @BeforeEach
    fun begin() {
        store = BundleStore(directory.resolve("store"))
    }

    private fun import(source: BundleSource, into: BundleStore = store): StoredBundle =
        runBlocking(Dispatchers.IO) { BundleImporter(into).import("picked", source) }

    private fun files(): Map<String, ByteArray> =
        filesOf(origin).keys.associateWith { Files.readAllBytes(origin.resolve(it)) }

    private fun zip(files: Map<String, ByteArray>): ByteArray {
        val bytes = ByteArrayOutputStream()
        ZipOutputStream(bytes).use { zip ->
            for ((path, content) in files) {
                zip.putNextEntry(ZipEntry(path))
                zip.write(content)
            }
        }
        return bytes.toByteArray()
    }

    private fun source(files: Map<String, ByteArray>): BundleSource = zip(files).let { ZipSource { ByteArrayInputStream(it) } }

    private fun assertRefused(expected: String, source: BundleSource) {
        assertEquals(expected, assertFailsWith<BundleError> { import(source) }.message)
        assertEquals(0, Files.list(store.root).use { it.count() })
    }

    @Test
    fun `a folder is copied and verified`() {
        val stored = import(DirectorySource(origin))
        assertNull(stored.problem)
        assertEquals(filesOf(origin), stored.files)
        assertTrue(stored.bundle!!.verify() > 30)
    }

    @Test
    fun `a zip is read from front to back, with and without a directory around the bundle`() {
        assertTrue(import(source(files())).bundle!!.verify() > 30)
        store.delete("picked")
        assertTrue(import(source(files().mapKeys { "qwen2/${it.key}" })).bundle!!.verify() > 30)
    }

    @Test
    fun `a file that leaves the bundle is refused`() {
        assertRefused("path '../../x' must be relative and stay inside the bundle", source(files() + ("../../x" to ByteArray(1))))
        assertRefused("path '/x' must be relative and stay inside the bundle", source(files() + ("/x" to ByteArray(1))))
    }

    @Test
    fun `files too many, too few and changed are refused by name`() {
        val pack = "experts/layer_001/experts.pack"
        assertRefused("notes.txt: is not named in checksums.json", source(files() + ("notes.txt" to ByteArray(1))))
        assertRefused("$pack: missing from the bundle", source(files() - pack))
        val changed = files().getValue(pack).clone().also { it[9] = (it[9] + 1).toByte() }
        assertRefused("$pack: SHA-256 differs from checksums.json; the file is corrupt", source(files() + (pack to changed)))
        assertRefused("picked: not a bundle, it holds no checksums.json", source(files() - "checksums.json"))
        assertRefused("picked: not a bundle, it holds no checksums.json", source(emptyMap()))
    }

    @Test
    fun `a broken archive is refused`() {
        val whole = zip(files())
        assertFailsWith<LesonnxError> { import(ZipSource { ByteArrayInputStream(whole, 0, whole.size / 2) }) }
        assertEquals(0, Files.list(store.root).use { it.count() })
    }

    @Test
    fun `storage that ends on the way leaves nothing`() {
        val small = BundleStore(directory.resolve("small")) { 50_000 }
        val error = assertFailsWith<SpaceError> { import(DirectorySource(origin), small) }
        assertEquals(50_000, error.freeBytes)
        assertEquals(0, Files.list(small.root).use { it.count() })
    }

    @Test
    fun `links are not followed`() {
        val copy = directory.resolve("copy")
        origin.toFile().copyRecursively(copy.toFile())
        val pack = copy.resolve("experts/layer_001/experts.pack")
        Files.delete(pack)
        Files.createSymbolicLink(pack, origin.resolve("experts/layer_001/experts.pack"))
        assertRefused("experts/layer_001/experts.pack: missing from the bundle", DirectorySource(copy))
    }

    @Test
    fun `a bundle that breaks in the store is listed with its problem`() {
        import(DirectorySource(origin))
        Files.write(store.root.resolve("picked/experts/layer_000/experts.pack"), ByteArray(10))
        val stored = store.list().single()
        assertNull(stored.bundle)
        assertTrue(stored.problem!!.contains("experts.pack: has 10 bytes"), stored.problem)
    }
}
