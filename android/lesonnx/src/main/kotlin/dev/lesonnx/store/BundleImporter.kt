package dev.lesonnx.store

import dev.lesonnx.BundleError
import dev.lesonnx.Checksums
import dev.lesonnx.LesonnxError
import java.io.IOException
import java.nio.file.Files
import java.nio.file.Path
import java.util.zip.ZipException

/** Copies a bundle that a person picked into a store, hashing as it copies, so that nothing is read twice. */
class BundleImporter(private val store: BundleStore) {
    /**
     * Copies [source] to the new bundle [name]; gives it. A single directory around the bundle, as zips often have, is taken off.
     *
     * BundleError for what is no bundle, is not whole or names a path that leaves it, SpaceError where storage ends,
     * LesonnxError where reading or writing fails. After an error or a cancellation nothing is left.
     *
     * @param progress bytes copied so far.
     */
    suspend fun import(name: String, source: BundleSource, progress: (Long) -> Unit = {}): StoredBundle {
        val arrival = store.arrival(name)
        arrival.discard()
        try {
            arrival.begin()
            val copied = copyAll(source, arrival, progress)
            val root = rootOf(arrival.files, name)
            val prefix = arrival.files.relativize(root).joinToString("/").let { if (it.isEmpty()) "" else "$it/" }
            check(root, copied, prefix)
            arrival.publish(root)
        } catch (error: ZipException) {
            throw BundleError("$name: the archive is broken: ${error.message}")
        } catch (error: IOException) {
            throw LesonnxError("$name: could not be copied: ${error.message}")
        } finally {
            arrival.discard()
        }
        return store.open(name)
    }

    /** Copies every file; gives the SHA-256 of each by its path. */
    private suspend fun copyAll(source: BundleSource, arrival: Arrival, progress: (Long) -> Unit): Map<String, String> {
        val copied = HashMap<String, String>()
        val room = store.freeBytes()
        var total = 0L
        source.files { file ->
            val target = arrival.file(file.path)
            if (file.path in copied) throw BundleError("${file.path}: is there twice")
            Files.createDirectories(target.parent)
            val digest = sha256()
            file.open().use { input ->
                Files.newOutputStream(target).use { output ->
                    copy(input, output, digest) { count ->
                        total += count
                        if (total > room) throw SpaceError(total, room)
                        progress(total)
                    }
                }
            }
            copied[file.path] = digest.hex()
        }
        return copied
    }

    private fun rootOf(files: Path, name: String): Path {
        if (Files.isRegularFile(files.resolve(Checksums.FILE))) return files
        val only = files.toFile().listFiles().orEmpty().singleOrNull { it.isDirectory }?.toPath()
        if (only != null && Files.isRegularFile(only.resolve(Checksums.FILE))) return only
        throw BundleError("$name: not a bundle, it holds no ${Checksums.FILE}")
    }

    private fun check(root: Path, copied: Map<String, String>, prefix: String) {
        val expected = Checksums.read(root.resolve(Checksums.FILE))
        for (path in copied.keys.sorted()) {
            if (!path.startsWith(prefix)) throw BundleError("$path: lies beside the bundle, expected all files in $prefix")
            val relative = path.removePrefix(prefix)
            if (relative != Checksums.FILE && relative !in expected) throw BundleError("$relative: is not named in ${Checksums.FILE}")
        }
        for ((path, checksum) in expected) {
            val found = copied[prefix + path] ?: throw BundleError("$path: missing from the bundle")
            val size = Files.size(root.resolve(path))
            if (size != checksum.sizeBytes) throw BundleError("$path: has $size bytes, ${Checksums.FILE} says ${checksum.sizeBytes}")
            if (found != checksum.sha256) throw BundleError("$path: SHA-256 differs from ${Checksums.FILE}; the file is corrupt")
        }
    }
}
