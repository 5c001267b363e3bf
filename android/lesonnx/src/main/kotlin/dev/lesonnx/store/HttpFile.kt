package dev.lesonnx.store

import dev.lesonnx.BundleError
import kotlinx.coroutines.awaitCancellation
import kotlinx.coroutines.coroutineScope
import kotlinx.coroutines.ensureActive
import kotlinx.coroutines.launch
import java.io.IOException
import java.io.InputStream
import java.net.HttpURLConnection
import java.net.URL
import java.util.concurrent.atomic.AtomicBoolean

private const val CONNECT_TIMEOUT_MS = 15_000
private const val READ_TIMEOUT_MS = 20_000
private const val HTTP_RANGE_NOT_SATISFIABLE = 416

/**
 * Asks for a file from byte [offset] on and gives [body] the stream and the byte it really starts at: [offset], or 0 where
 * the server knows no ranges. Cancelling closes the connection; on Android that ends a read at once, on a plain JVM a read that waits
 * for a silent server ends by its timeout.
 *
 * BundleError where the server says that the file cannot be had, IOException where asking again may help.
 */
internal suspend fun <T> openHttp(url: URL, offset: Long, body: suspend (InputStream, Long) -> T): T = coroutineScope {
    val connection = url.openConnection() as? HttpURLConnection ?: throw BundleError("$url: expected an address of http or https")
    val isRead = AtomicBoolean()
    // A read blocks its thread; only closing the connection from another one can end it. One that was read to its end stays open
    // for the next file.
    val closer = launch {
        try {
            awaitCancellation()
        } finally {
            if (!isRead.get()) connection.disconnect()
        }
    }
    try {
        connection.connectTimeout = CONNECT_TIMEOUT_MS
        connection.readTimeout = READ_TIMEOUT_MS
        // Else a compressed answer would make ranges mean something else.
        connection.setRequestProperty("Accept-Encoding", "identity")
        if (offset > 0) connection.setRequestProperty("Range", "bytes=$offset-")
        val start = startOf(connection, url, offset)
        connection.inputStream.use { body(it, start) }.also { isRead.set(true) }
    } catch (error: RuntimeException) {
        // Closed from another thread in the middle of an answer, a client may fail in ways of its own.
        ensureActive()
        throw error
    } finally {
        closer.cancel()
    }
}

/** The server's file ends before the byte that was asked for. */
internal class NoSuchRange : IOException("the server's file is shorter than what is here")

private fun startOf(connection: HttpURLConnection, url: URL, offset: Long): Long = when (val code = connection.responseCode) {
    HttpURLConnection.HTTP_OK -> 0
    HttpURLConnection.HTTP_PARTIAL -> {
        val range = connection.getHeaderField("Content-Range").orEmpty()
        if (!range.startsWith("bytes $offset-")) throw BundleError("$url: asked for bytes from $offset on, got '$range'")
        offset
    }
    HTTP_RANGE_NOT_SATISFIABLE -> throw NoSuchRange()
    in 400..499 -> throw BundleError("$url: the server answers $code ${connection.responseMessage}")
    else -> throw IOException("the server answers $code ${connection.responseMessage}")
}
