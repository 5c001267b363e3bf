package dev.lesonnx.store

import java.io.InputStream
import java.nio.file.Files
import java.nio.file.Path
import java.util.zip.ZipInputStream

/** A file that a bundle is copied from. [open]'s stream belongs to the caller and is taken before the next file. */
class SourceFile(val path: String, val open: () -> InputStream)

/** Where a picked bundle comes from: a tree of files with relative paths, in any order. Taken once. */
fun interface BundleSource {
    /** Calls [visit] with every file. Errors of reading are IOExceptions. */
    suspend fun files(visit: suspend (SourceFile) -> Unit)
}

/** A directory. Links are not followed. */
class DirectorySource(private val directory: Path) : BundleSource {
    override suspend fun files(visit: suspend (SourceFile) -> Unit) {
        val paths = Files.walk(directory).use { all ->
            all.iterator().asSequence().filter { Files.isRegularFile(it) && !Files.isSymbolicLink(it) }.toList()
        }
        for (path in paths.sorted()) {
            val relative = directory.relativize(path).joinToString("/")
            visit(SourceFile(relative) { Files.newInputStream(path) })
        }
    }
}

/** A zip, read front to back without seeking, so that any document provider can give it. [open] gives a fresh stream of it. */
class ZipSource(private val open: () -> InputStream) : BundleSource {
    override suspend fun files(visit: suspend (SourceFile) -> Unit) {
        ZipInputStream(open().buffered(BUFFER_BYTES)).use { zip ->
            while (true) {
                val entry = zip.nextEntry ?: break
                if (!entry.isDirectory) visit(SourceFile(entry.name) { Entry(zip) })
                zip.closeEntry()
            }
        }
    }

    /** One entry: closing it leaves the archive open. */
    private class Entry(private val zip: ZipInputStream) : InputStream() {
        override fun read(): Int = zip.read()

        override fun read(bytes: ByteArray, offset: Int, length: Int): Int = zip.read(bytes, offset, length)
    }

    private companion object {
        const val BUFFER_BYTES = 1 shl 16
    }
}
