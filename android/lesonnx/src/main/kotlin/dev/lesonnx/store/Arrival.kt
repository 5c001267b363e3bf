package dev.lesonnx.store

import dev.lesonnx.BundleError
import dev.lesonnx.Checksums
import dev.lesonnx.staysInside
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.StandardCopyOption

/**
 * A bundle on its way in: a directory beside its target. Not thread-safe but for what it hands out.
 *
 * `files/` holds files that are whole and verified, `parts/` what has come of others, `source` the address.
 */
internal class Arrival(private val directory: Path, private val target: Path) {
    val files: Path = directory.resolve("files")
    private val parts: Path = directory.resolve("parts")
    private val source: Path = directory.resolve("source")

    /** Where it comes from; null for what cannot go on. */
    val url: String?
        get() = if (Files.isRegularFile(source)) source.toFile().readText().ifEmpty { null } else null

    fun begin(url: String? = null) {
        Files.createDirectories(files)
        Files.createDirectories(parts)
        if (url != null) source.toFile().writeText(url)
    }

    fun file(path: String): Path = inside(files, path)

    fun part(path: String): Path = inside(parts, path)

    /** A part has become the whole file. */
    fun keep(path: String) {
        val file = file(path)
        Files.createDirectories(file.parent)
        Files.move(part(path), file, StandardCopyOption.ATOMIC_MOVE)
    }

    /** Drops what an earlier list of files said otherwise, or not at all. */
    fun forget(before: Map<String, Checksums.Entry>, now: Map<String, Checksums.Entry>) {
        for ((path, checksum) in before) {
            if (now[path] != checksum) {
                Files.deleteIfExists(file(path))
                Files.deleteIfExists(part(path))
            }
        }
    }

    /** The list of files as it came before; empty where there is none that can be read. */
    fun checksums(): Map<String, Checksums.Entry> = try {
        Checksums.read(files.resolve(Checksums.FILE))
    } catch (_: BundleError) {
        emptyMap()
    }

    /** Everything is there and verified: the bundle takes its name. [root] is where it lies in `files/`. */
    fun publish(root: Path = files) {
        Files.move(root, target, StandardCopyOption.ATOMIC_MOVE)
        discard()
    }

    fun discard() {
        directory.toFile().deleteRecursively()
    }

    private fun inside(root: Path, path: String): Path {
        requirePath(path)
        return root.resolve(path)
    }
}

/** BundleError for a path that could leave the directory it is meant for. */
internal fun requirePath(path: String) {
    if (!staysInside(path)) throw BundleError("path '$path' must be relative and stay inside the bundle")
}
