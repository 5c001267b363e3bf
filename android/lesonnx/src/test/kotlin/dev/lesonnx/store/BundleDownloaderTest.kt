package dev.lesonnx.store

import dev.lesonnx.BundleError
import dev.lesonnx.Checksums
import dev.lesonnx.InputError
import dev.lesonnx.LesonnxError
import dev.lesonnx.TestData
import kotlinx.coroutines.CompletableDeferred
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking
import org.junit.jupiter.api.AfterEach
import org.junit.jupiter.api.BeforeEach
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir
import java.nio.file.Files
import java.nio.file.Path
import java.util.concurrent.CountDownLatch
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertFalse
import kotlin.test.assertNotNull
import kotlin.test.assertNull
import kotlin.test.assertTrue

/** Downloads over real HTTP: whole, broken off, gone on with, and refused. */
class BundleDownloaderTest {
    @TempDir
    lateinit var directory: Path
    private val origin: Path = TestData.mobile.resolve("bundles/qwen2_moe-int4")
    private lateinit var server: BundleServer
    private lateinit var store: BundleStore
    private val pack = "experts/layer_002/experts.pack"
    private val packBytes get() = Files.size(origin.resolve(pack))

    @BeforeEach
    fun begin() {
        server = BundleServer(origin)
        store = BundleStore(directory.resolve("store"))
    }

    @AfterEach
    fun end() = server.close()

    private fun downloader(connections: Int = 4) = BundleDownloader(store, connections, retryDelayMs = 1)

    private fun download(name: String = "sample") = runBlocking(Dispatchers.IO) { downloader().download(name, server.url) }

    @Test
    fun `a bundle arrives whole, under its name, with nothing left beside it`() {
        var last: DownloadProgress? = null
        val stored = runBlocking(Dispatchers.IO) { downloader(connections = 1).download("sample", server.url) { last = it } }
        assertNull(stored.problem)
        assertTrue(assertNotNull(stored.bundle).verify() > 30)
        assertEquals(listOf("sample"), Files.list(store.root).use { all -> all.map { it.fileName.toString() }.toList() })
        val end = assertNotNull(last)
        assertEquals(end.totalBytes, end.doneBytes)
        assertEquals(stored.sizeBytes - Files.size(origin.resolve(Checksums.FILE)), end.totalBytes)
    }

    @Test
    fun `a look fetches no more than the manifest and the list of files`() {
        val remote = runBlocking(Dispatchers.IO) { downloader().look(server.url) }
        assertEquals("qwen2_moe", remote.manifest.model.modelType)
        assertEquals(setOf("manifest.json", Checksums.FILE), server.served.map { it.path }.toSet())
        assertTrue(remote.totalBytes > 100_000)
    }

    @Test
    fun `a connection that breaks goes on at the byte where it broke`() {
        server.treat = { path, attempt -> if (path == pack && attempt < 2) Treatment(sendAtMost = 10_000) else Treatment() }
        assertTrue(download().bundle!!.verify() > 0)
        assertEquals(listOf(0L, 10_000L, 20_000L), server.of(pack).map { it.from })
        assertEquals(packBytes, server.of(pack).sumOf { it.bytes })
    }

    @Test
    fun `a cancelled download is paused and goes on where it ended`() {
        val reached = CompletableDeferred<Unit>()
        val hold = CountDownLatch(1)
        server.treat = { path, attempt ->
            if (path == pack && attempt == 0) Treatment(sendAtMost = 15_000, beforeEnd = hold::await) else Treatment()
        }
        val part = store.arrival("sample").part(pack).toFile()
        runBlocking(Dispatchers.IO) {
            val job = launch {
                downloader().download("sample", server.url) { if (part.length() >= 15_000) reached.complete(Unit) }
            }
            reached.await()
            job.cancel()
            hold.countDown()
            job.join()
        }
        val paused = store.paused().single()
        assertEquals("sample" to server.url, paused.name to paused.url)
        assertTrue(paused.haveBytes >= 15_000)
        assertTrue(store.list().isEmpty())

        val whole = server.served.filter { it.from == 0L && it.path != pack }.map { it.path }
        assertTrue(download().bundle!!.verify() > 0)
        assertEquals(15_000L, server.of(pack).last().from)
        // What had come whole was not fetched again, but for the list of files and what was under way.
        val again = server.served.map { it.path }.groupingBy { it }.eachCount().filterValues { it > 1 }.keys
        assertTrue(again.size <= 1 + 4, "fetched again: $again of ${whole.size}")
        assertTrue(store.paused().isEmpty())
    }

    @Test
    fun `a server without ranges sends the file anew`() {
        server.treat = { path, attempt ->
            if (path == pack) Treatment(ranges = false, sendAtMost = if (attempt == 0) 5_000 else Long.MAX_VALUE) else Treatment()
        }
        assertTrue(download().bundle!!.verify() > 0)
        assertEquals(listOf(0L, 0L), server.of(pack).map { it.from })
    }

    @Test
    fun `a part of another version is thrown away once`() {
        store.arrival("sample").begin(server.url)
        val part = store.arrival("sample").part(pack)
        Files.createDirectories(part.parent)
        Files.write(part, ByteArray(1000) { 7 })
        assertTrue(download().bundle!!.verify() > 0)
        assertEquals(listOf(1000L, 0L), server.of(pack).map { it.from })
    }

    @Test
    fun `a part that is longer than the file is thrown away`() {
        store.arrival("sample").begin(server.url)
        val part = store.arrival("sample").part(pack)
        Files.createDirectories(part.parent)
        Files.write(part, ByteArray(packBytes.toInt() + 5))
        assertTrue(download().bundle!!.verify() > 0)
    }

    @Test
    fun `a wrong checksum is refused by the name of the file, and nothing takes the bundle's name`() {
        server.treat = { path, _ -> if (path == pack) Treatment(change = { it.also { bytes -> bytes[5] = (bytes[5] + 1).toByte() } }) else Treatment() }
        val error = assertFailsWith<BundleError> { download() }
        assertEquals("${server.url}/$pack: SHA-256 differs from checksums.json; the file is corrupt", error.message)
        assertEquals(1, server.of(pack).size)
        assertTrue(store.list().isEmpty())
        // A server that has come right again gets the rest alone.
        server.treat = { _, _ -> Treatment() }
        val before = server.served.size
        assertTrue(download().bundle!!.verify() > 0)
        assertTrue(server.served.size - before < 40)
    }

    @Test
    fun `a file that is longer than its list says is refused`() {
        server.treat = { path, _ -> if (path == pack) Treatment(change = { it + 1 }) else Treatment() }
        val error = assertFailsWith<BundleError> { download() }
        assertEquals("${server.url}/$pack: is longer than the $packBytes bytes that checksums.json says", error.message)
    }

    @Test
    fun `a list that names a file outside is refused before anything is written`() {
        val evil = directory.resolve("evil")
        Files.createDirectories(evil)
        for (path in listOf("../../outside", "/outside", "a\\b", "c:x")) {
            val name = path.replace("\\", "\\\\")
            Files.writeString(evil.resolve(Checksums.FILE), """{"algorithm": "sha256", "files": {"$name": {"size_bytes": 1, "sha256": "00"}}}""" + "\n")
            BundleServer(evil).use { other ->
                val error = assertFailsWith<BundleError> { runBlocking(Dispatchers.IO) { downloader().download("evil", other.url) } }
                assertEquals("${other.url}/checksums.json: path '$path' must be relative and stay inside the bundle", error.message)
            }
        }
        assertTrue(store.paused().isEmpty())
        assertFalse(Files.exists(directory.resolve("outside")))
    }

    @Test
    fun `a missing file and an unreachable server are said in one line`() {
        server.treat = { path, _ -> Treatment(status = if (path == pack) 404 else null) }
        assertEquals("${server.url}/$pack: the server answers 404 Not Found", assertFailsWith<BundleError> { download() }.message)
        val url = server.url
        server.close()
        val error = assertFailsWith<LesonnxError> { runBlocking(Dispatchers.IO) { downloader().look(url) } }
        assertTrue(error.message!!.startsWith("$url/checksums.json: the connection fails: "), error.message)
    }

    @Test
    fun `a server that fails for a moment is asked again`() {
        server.treat = { path, attempt -> Treatment(status = if (path == pack && attempt < 3) 503 else null) }
        assertTrue(download().bundle!!.verify() > 0)
        assertEquals(4, server.of(pack).size)
    }

    @Test
    fun `addresses that are none are refused`() {
        for (url in listOf("", "sample", "file:///etc/passwd", "ftp://host/x", "http://[", "http://a b/")) {
            assertFailsWith<InputError>(url) { runBlocking { downloader().look(url) } }
        }
    }

    @Test
    fun `storage that is too small is said before anything is fetched, and counts what has come`() {
        val small = BundleStore(directory.resolve("small")) { 10_000 }
        val error = assertFailsWith<SpaceError> { runBlocking(Dispatchers.IO) { BundleDownloader(small).download("sample", server.url) } }
        assertEquals(10_000, error.freeBytes)
        assertTrue(error.neededBytes > 100_000)
        assertEquals(setOf(Checksums.FILE), server.served.map { it.path }.toSet())
        assertTrue(error.message!!.matches(Regex("this needs [\\d.]+ kB of storage, the device has 10.0 kB free")), error.message)
    }

    @Test
    fun `a name that is taken is refused, an unused one is found`() {
        download()
        assertFailsWith<InputError> { download() }
        assertEquals("sample-2", store.unusedName("sample"))
        assertEquals("a-b", store.unusedName("../a b/"))
        assertEquals("bundle", store.unusedName("..."))
    }

    @Test
    fun `a download that was given up leaves nothing`() {
        server.treat = { path, _ -> Treatment(status = if (path == pack) 404 else null) }
        assertFailsWith<BundleError> { download() }
        store.discard(store.paused().single().name)
        assertEquals(0, Files.list(store.root).use { it.count() })
    }
}
