package dev.lesonnx.store

import dev.lesonnx.BundleError
import dev.lesonnx.BundleManifest
import dev.lesonnx.Checksums
import dev.lesonnx.InputError
import dev.lesonnx.LesonnxError
import kotlinx.coroutines.coroutineScope
import kotlinx.coroutines.delay
import kotlinx.coroutines.launch
import java.io.ByteArrayOutputStream
import java.io.File
import java.io.FileOutputStream
import java.io.IOException
import java.net.MalformedURLException
import java.net.URI
import java.net.URISyntaxException
import java.net.URL
import java.net.URLEncoder
import java.nio.file.Files
import java.security.MessageDigest
import java.util.concurrent.ConcurrentLinkedQueue
import java.util.concurrent.atomic.AtomicLong

/** What a bundle on a server is, before it is fetched. [checksums] are its files but `checksums.json` itself. */
class RemoteBundle(val url: String, val manifest: BundleManifest, val checksums: Map<String, Checksums.Entry>) {
    val totalBytes: Long get() = checksums.values.sumOf { it.sizeBytes }
}

/** How far a download is. */
data class DownloadProgress(val doneBytes: Long, val totalBytes: Long)

/**
 * Fetches a bundle, a directory that any plain HTTP server shows, into a store.
 *
 * Every file is held against the SHA-256 that `checksums.json` says before it counts. What was broken off goes on where it ended, by
 * HTTP ranges where the server has them. Functions suspend on blocking reads: call them on a dispatcher for input and output.
 *
 * @param connections files under way at once: a bundle has thousands of small ones.
 * @param retryDelayMs pause before the first try again; it doubles.
 */
class BundleDownloader(
    private val store: BundleStore,
    private val connections: Int = 4,
    private val retryDelayMs: Long = 1_000,
) {
    /** Reads a remote bundle's manifest and list of files, so that a person can decide. Errors as of [download]. */
    suspend fun look(url: String): RemoteBundle {
        val base = baseOf(url)
        val checksums = Checksums.parse(small(base, Checksums.FILE), "$base${Checksums.FILE}")
        val manifest = BundleManifest.parse(small(base, MANIFEST), "$base$MANIFEST")
        return RemoteBundle(url, manifest, checksums)
    }

    /**
     * Fetches the bundle at [url] as [name], going on with what an earlier call left; gives it.
     *
     * BundleError where the server lacks a file or has one that differs from the checksums, SpaceError before anything is fetched
     * that would not fit, LesonnxError where the connection fails again and again. In all cases, and when cancelled, what has come stays
     * for the next call; [BundleStore.discard] gives it up.
     *
     * @param progress is called from several threads.
     */
    suspend fun download(name: String, url: String, progress: (DownloadProgress) -> Unit = {}): StoredBundle {
        val base = baseOf(url)
        if (Files.exists(store.directory(name))) throw InputError("$name: there is a bundle of that name")
        val text = small(base, Checksums.FILE)
        val checksums = Checksums.parse(text, "$base${Checksums.FILE}")
        val arrival = store.arrival(name)
        try {
            arrival.begin(url)
            arrival.forget(arrival.checksums(), checksums)
            arrival.files.resolve(Checksums.FILE).toFile().writeText(text)
            fetchAll(base, arrival, checksums, progress)
            arrival.publish()
        } catch (error: IOException) {
            throw LesonnxError("$name: could not be written: ${error.message}")
        }
        return store.open(name)
    }

    private suspend fun fetchAll(
        base: URL,
        arrival: Arrival,
        checksums: Map<String, Checksums.Entry>,
        progress: (DownloadProgress) -> Unit,
    ) {
        val total = checksums.values.sumOf { it.sizeBytes }
        val missing = checksums.filter { (path, checksum) -> !isThere(arrival, path, checksum) }
        val have = missing.keys.sumOf { arrival.part(it).toFile().length() }
        val toCome = missing.values.sumOf { it.sizeBytes } - have
        store.requireRoom(toCome)
        val done = AtomicLong(total - toCome)
        val queue = ConcurrentLinkedQueue(missing.entries)
        progress(DownloadProgress(done.get(), total))
        coroutineScope {
            repeat(minOf(connections, missing.size)) {
                launch {
                    while (true) {
                        val (path, checksum) = queue.poll() ?: break
                        fetch(base, arrival, path, checksum) { progress(DownloadProgress(done.addAndGet(it), total)) }
                    }
                }
            }
        }
    }

    private fun isThere(arrival: Arrival, path: String, checksum: Checksums.Entry): Boolean {
        val file = arrival.file(path)
        return Files.isRegularFile(file) && Files.size(file) == checksum.sizeBytes
    }

    /** One file, tried again while that helps; [progress] gets bytes, negative ones where a part is thrown away. */
    private suspend fun fetch(base: URL, arrival: Arrival, path: String, checksum: Checksums.Entry, progress: (Long) -> Unit) {
        val part = arrival.part(path)
        Files.createDirectories(part.parent)
        var failures = 0
        while (true) {
            val before = part.toFile().length()
            try {
                if (attempt(fileUrl(base, path), part.toFile(), checksum, progress)) break
                // A part from another version of the file, or a broken one: once more from the start, then it is the server's.
                progress(-part.toFile().length())
                part.toFile().delete()
                if (before == 0L) throw BundleError("${fileUrl(base, path)}: SHA-256 differs from ${Checksums.FILE}; the file is corrupt")
            } catch (error: IOException) {
                val cameFurther = part.toFile().length() > before
                failures = if (cameFurther) 1 else failures + 1
                if (failures == MAX_FAILURES) throw LesonnxError("${fileUrl(base, path)}: the connection fails: ${error.message}")
                delay(retryDelayMs shl (failures - 1))
            }
        }
        arrival.keep(path)
    }

    /** Gets what is missing of one file; false where the whole is not what the checksum says. */
    private suspend fun attempt(url: URL, part: File, checksum: Checksums.Entry, progress: (Long) -> Unit): Boolean {
        val have = part.length()
        val digest = sha256()
        if (have > 0) digest.add(part.toPath())
        if (have >= checksum.sizeBytes) {
            part.exists() || part.createNewFile()
            return have == checksum.sizeBytes && digest.hex() == checksum.sha256
        }
        return try {
            receive(url, part, have, digest, checksum, progress)
        } catch (_: NoSuchRange) {
            false
        }
    }

    private suspend fun receive(
        url: URL,
        part: File,
        have: Long,
        digest: MessageDigest,
        checksum: Checksums.Entry,
        progress: (Long) -> Unit,
    ): Boolean =
        openHttp(url, have) { input, start ->
            if (start < have) {
                digest.reset()
                progress(-have)
            }
            FileOutputStream(part, start > 0).use { output ->
                copy(input, output, digest, checksum.sizeBytes - start, progress)
            }
            if (part.length() < checksum.sizeBytes) throw IOException("it ended after ${part.length()} of ${checksum.sizeBytes} bytes")
            if (input.read() >= 0) throw BundleError("$url: is longer than the ${checksum.sizeBytes} bytes that ${Checksums.FILE} says")
            digest.hex() == checksum.sha256
        }

    /** A small text file, tried again as others are. */
    private suspend fun small(base: URL, path: String): String {
        val url = fileUrl(base, path)
        var failures = 0
        while (true) {
            try {
                return openHttp(url, 0) { input, _ ->
                    val bytes = ByteArrayOutputStream()
                    copy(input, bytes, sha256(), MAX_LIST_BYTES) {}
                    if (input.read() >= 0) throw BundleError("$url: is larger than $MAX_LIST_BYTES bytes")
                    bytes.toString("UTF-8")
                }
            } catch (error: IOException) {
                failures += 1
                if (failures == MAX_FAILURES) throw LesonnxError("$url: the connection fails: ${error.message}")
                delay(retryDelayMs shl (failures - 1))
            }
        }
    }

    private fun baseOf(url: String): URL = try {
        val base = URI(if (url.endsWith("/")) url else "$url/").toURL()
        if (base.protocol != "http" && base.protocol != "https") throw InputError("$url: expected an address of http or https")
        base
    } catch (error: MalformedURLException) {
        throw InputError("'$url' is not an address: ${error.message}")
    } catch (error: URISyntaxException) {
        throw InputError("'$url' is not an address: ${error.message}")
    } catch (error: IllegalArgumentException) {
        throw InputError("'$url' is not an address: ${error.message}")
    }

    private fun fileUrl(base: URL, path: String): URL {
        requirePath(path)
        // URLEncoder is for forms, which write a space as +.
        return URL(base, path.split('/').joinToString("/") { URLEncoder.encode(it, "UTF-8").replace("+", "%20") })
    }

    private companion object {
        const val MANIFEST = "manifest.json"
        const val MAX_FAILURES = 4
        const val MAX_LIST_BYTES = 64L shl 20
    }
}
