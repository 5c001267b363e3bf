package dev.lesonnx.store

import com.sun.net.httpserver.HttpExchange
import com.sun.net.httpserver.HttpServer
import java.net.InetAddress
import java.net.InetSocketAddress
import java.nio.file.Files
import java.nio.file.Path
import java.util.concurrent.CopyOnWriteArrayList
import java.util.concurrent.ExecutorService
import java.util.concurrent.Executors

/** What a request got: the file, the byte it asked to begin at, the bytes that it was sent. */
class Served(val path: String, val from: Long, val bytes: Long)

/** How a server treats one request for a file; the default is as it should be. */
class Treatment(
    val status: Int? = null,
    val ranges: Boolean = true,
    val sendAtMost: Long = Long.MAX_VALUE,
    val change: (ByteArray) -> ByteArray = { it },
    val beforeEnd: () -> Unit = {},
)

/** A real HTTP server on this machine that shows a directory, with ranges, and fails where a test says. */
class BundleServer(private val directory: Path) : AutoCloseable {
    private val server: HttpServer = HttpServer.create(InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 0)
    private val threads: ExecutorService = Executors.newCachedThreadPool()

    /** Every answer, in order. */
    val served = CopyOnWriteArrayList<Served>()

    /** How to treat a request for a file, counted from 0 a file. */
    @Volatile
    var treat: (path: String, attempt: Int) -> Treatment = { _, _ -> Treatment() }

    init {
        server.executor = threads
        server.createContext("/bundles/") { exchange -> exchange.use(::answer) }
        server.start()
    }

    val url: String get() = "http://${server.address.hostString}:${server.address.port}/bundles/${directory.fileName}"

    fun of(path: String): List<Served> = served.filter { it.path == path }

    private fun answer(exchange: HttpExchange) {
        val path = exchange.requestURI.path.removePrefix("/bundles/${directory.fileName}/")
        val treatment = treat(path, of(path).size)
        val file = directory.resolve(path)
        if (treatment.status != null || !Files.isRegularFile(file)) {
            served += Served(path, 0, 0)
            exchange.sendResponseHeaders(treatment.status ?: 404, -1)
            return
        }
        val content = treatment.change(Files.readAllBytes(file))
        val range = exchange.requestHeaders.getFirst("Range")
        val from = if (range != null && treatment.ranges) range.removePrefix("bytes=").removeSuffix("-").toInt() else 0
        if (from > 0 && from >= content.size) {
            served += Served(path, from.toLong(), 0)
            exchange.sendResponseHeaders(416, -1)
            return
        }
        val length = minOf(content.size - from.toLong(), treatment.sendAtMost).toInt()
        served += Served(path, from.toLong(), length.toLong())
        if (from > 0) exchange.responseHeaders.set("Content-Range", "bytes $from-${content.size - 1}/${content.size}")
        exchange.sendResponseHeaders(if (from > 0) 206 else 200, if (content.size == from) -1 else content.size - from.toLong())
        exchange.responseBody.write(content, from, length)
        exchange.responseBody.flush()
        treatment.beforeEnd()
    }

    private companion object {
        init {
            // Else every small answer waits 40 ms for an acknowledgement.
            System.setProperty("sun.net.httpserver.nodelay", "true")
        }
    }

    override fun close() {
        server.stop(0)
        threads.shutdownNow()
    }
}
