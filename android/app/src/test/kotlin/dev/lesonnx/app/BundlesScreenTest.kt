package dev.lesonnx.app

import android.app.Activity
import android.app.AlertDialog
import android.content.Intent
import android.net.Uri
import android.provider.DocumentsContract
import com.sun.net.httpserver.HttpServer
import dev.lesonnx.app.model.HostState
import dev.lesonnx.store.Fit
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertTrue
import org.junit.Test
import org.robolectric.Robolectric
import org.robolectric.Shadows.shadowOf
import org.robolectric.shadows.ShadowDialog
import java.io.ByteArrayOutputStream
import java.io.File
import java.net.InetAddress
import java.net.InetSocketAddress
import java.util.concurrent.CountDownLatch
import java.util.concurrent.Executors
import java.util.concurrent.atomic.AtomicBoolean
import java.util.zip.ZipEntry
import java.util.zip.ZipOutputStream

/** Bundles come, are checked against the device, loaded and deleted. */
class BundlesScreenTest : ScreenTest() {
    /** Serves the sample; of the file [held] the first request gets half, and the rest when [hold] lets it. */
    private fun <T> serving(held: String? = null, hold: CountDownLatch = CountDownLatch(0), use: (String) -> T): T {
        val server = HttpServer.create(InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 0)
        val threads = Executors.newCachedThreadPool()
        val isFirst = AtomicBoolean(true)
        server.executor = threads
        server.createContext("/sample/") { exchange ->
            exchange.use {
                val path = it.requestURI.path.removePrefix("/sample/")
                val file = File(Fixtures.sample, path)
                it.sendResponseHeaders(if (file.isFile) 200 else 404, if (file.isFile) file.length() else -1)
                if (!file.isFile) return@use
                val content = file.readBytes()
                val half = if (path == held && isFirst.getAndSet(false)) content.size / 2 else content.size
                it.responseBody.write(content, 0, half)
                it.responseBody.flush()
                if (half < content.size) hold.await()
            }
        }
        server.start()
        try {
            return use("http://${server.address.hostString}:${server.address.port}/sample")
        } finally {
            server.stop(0)
            threads.shutdownNow()
        }
    }

    @Test
    fun `without a bundle the ways to one are shown`() {
        start()
        waitFor("No bundle yet")
        draw("bundles-empty")
    }

    @Test
    fun `a bundle is looked at, fetched, loaded and deleted`() = serving { url ->
        start()
        waitFor("Look")
        type(url)
        click("Look")
        waitFor("Does it fit?")
        assertEquals(Fit.WHOLE, models.bundles.state.value.look?.fit?.fit)
        draw("bundles-look")
        val download = texts().single { it.startsWith("Download ") }
        click(download)
        waitFor("Load")
        assertEquals("sample", models.bundles.state.value.bundles?.single()?.stored?.name)
        click("Load")
        waitFor("Loaded")
        draw("bundles")
        click("Delete sample")
        val dialog = ShadowDialog.getLatestDialog() as AlertDialog
        dialog.getButton(AlertDialog.BUTTON_POSITIVE).performClick()
        waitFor("No bundle yet")
        assertEquals(HostState.Empty, models.host.state.value)
        assertFalse(File(bundles, "sample").exists())
    }

    @Test
    fun `a download shows how far it is, is paused and goes on`() {
        val hold = CountDownLatch(1)
        serving("experts/layer_005/experts.pack", hold) { url ->
            start()
            waitFor("Look")
            type(url)
            click("Look")
            waitFor("Does it fit?")
            click(texts().single { it.startsWith("Download ") })
            waitUntil("some megabytes") { (models.bundles.state.value.arrival?.doneBytes ?: 0) > 2_000_000 }
            assertTrue(texts().any { it.matches(Regex("[\\d.]+ MB of [\\d.]+ MB")) })
            draw("bundles-download")
            click("Pause")
            hold.countDown()
            waitFor("Go on")
            assertEquals("sample", models.bundles.state.value.paused.single().name)
            assertTrue(models.bundles.state.value.bundles!!.isEmpty())
            click("Go on")
            waitFor("Load")
            assertTrue(models.bundles.state.value.bundles!!.single().stored.bundle!!.verify() > 200)
            assertTrue(models.bundles.state.value.paused.isEmpty())
        }
    }

    @Test
    fun `an address without a bundle is said in a line`() = serving { url ->
        start()
        waitFor("Look")
        type("$url/nothing")
        click("Look")
        waitUntil("the problem") { models.bundles.state.value.problem != null }
        val problem = models.bundles.state.value.problem.orEmpty()
        assertEquals("$url/nothing/checksums.json: the server answers 404 Not Found", problem)
        assertTrue(problem, texts().contains(problem))
        draw("bundles-problem")
    }

    @Test
    fun `a picked folder is copied and verified`() {
        FolderProvider.folder = Fixtures.sample
        Robolectric.setupContentProvider(FolderProvider::class.java, FolderProvider.AUTHORITY)
        start()
        waitFor("Folder")
        click("Folder")
        val asked = shadowOf(activity).nextStartedActivityForResult
        assertEquals(Intent.ACTION_OPEN_DOCUMENT_TREE, asked.intent.action)
        val tree = DocumentsContract.buildTreeDocumentUri(FolderProvider.AUTHORITY, "root")
        shadowOf(activity).receiveResult(asked.intent, Activity.RESULT_OK, Intent().setData(tree))
        waitFor("Load")
        val stored = models.bundles.state.value.bundles!!.single().stored
        assertEquals("sample-int4", stored.name)
        assertTrue(stored.bundle!!.verify() > 200)
    }

    @Test
    fun `a picked zip is copied and verified, a broken one is said in a line`() {
        start()
        waitFor("Zip")
        val zip = ByteArrayOutputStream()
        ZipOutputStream(zip).use { out ->
            for (file in Fixtures.sample.walk().filter { it.isFile }) {
                out.putNextEntry(ZipEntry(file.relativeTo(Fixtures.sample).path))
                out.write(file.readBytes())
            }
        }
        val uri = Uri.parse("content://files/sample.zip")
        shadowOf(activity.contentResolver).registerInputStreamSupplier(uri) { zip.toByteArray().inputStream() }
        click("Zip")
        val asked = shadowOf(activity).nextStartedActivityForResult
        shadowOf(activity).receiveResult(asked.intent, Activity.RESULT_OK, Intent().setData(uri))
        waitFor("Load")
        assertTrue(models.bundles.state.value.bundles!!.single().stored.bundle!!.verify() > 200)

        val broken = Uri.parse("content://files/broken.zip")
        shadowOf(activity.contentResolver).registerInputStreamSupplier(broken) { zip.toByteArray().copyOf(zip.size() / 2).inputStream() }
        click("Zip")
        val again = shadowOf(activity).nextStartedActivityForResult
        shadowOf(activity).receiveResult(again.intent, Activity.RESULT_OK, Intent().setData(broken))
        waitUntil("the problem") { models.bundles.state.value.problem != null }
        assertEquals(1, models.bundles.state.value.bundles!!.size)
    }

    @Test
    fun `a broken bundle is listed with what is wrong`() {
        val copy = Fixtures.copySample(File(bundles, "sample"))
        File(copy, "experts/layer_000/experts.pack").writeBytes(ByteArray(10))
        start()
        waitFor("Broken")
        assertTrue(texts().any { it.contains("experts.pack: has 10 bytes") })
        assertNotNull(find("Delete sample"))
    }
}
