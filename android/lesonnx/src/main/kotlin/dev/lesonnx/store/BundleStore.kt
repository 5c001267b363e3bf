package dev.lesonnx.store

import dev.lesonnx.Bundle
import dev.lesonnx.InputError
import dev.lesonnx.LesonnxError
import java.io.File
import java.io.IOException
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.StandardCopyOption

/** A bundle under its name; [files] are sizes by path. [bundle] is null where it cannot be opened; [problem] says why, in one line. */
class StoredBundle(val name: String, val directory: Path, val files: Map<String, Long>, val bundle: Bundle?, val problem: String?) {
    val sizeBytes: Long get() = files.values.sum()
}

/** A download that was broken off: [haveBytes] of it are here, [url] is where the rest is. */
data class PausedDownload(val name: String, val url: String, val haveBytes: Long)

/** Storage that would not hold what is to be written; nothing was lost. */
class SpaceError(val neededBytes: Long, val freeBytes: Long) :
    LesonnxError("this needs ${formatBytes(neededBytes)} of storage, the device has ${formatBytes(freeBytes)} free")

/**
 * The bundles in one directory of the app's own, each in a directory of its name.
 *
 * A bundle is there whole or not at all: it arrives in `.NAME.partial` and is renamed. Several readers may use a store
 * at once; two arrivals of one name may not. Functions block on files: call them away from the main thread.
 *
 * @param freeBytes what the directory can still take.
 */
class BundleStore(val root: Path, internal val freeBytes: () -> Long = { root.toFile().usableSpace }) {
    init {
        Files.createDirectories(root)
    }

    /** All bundles by name. One that cannot be opened is listed with its problem. */
    fun list(): List<StoredBundle> = children { it.isDirectory && !it.name.startsWith(".") }.map { open(it.name) }

    /** The bundle of that name; InputError where there is none. */
    fun open(name: String): StoredBundle {
        val directory = directory(name)
        if (!Files.isDirectory(directory)) throw InputError("$name: no such bundle")
        val (bundle, problem) = try {
            Bundle(directory) to null
        } catch (error: LesonnxError) {
            null to error.message
        } catch (error: IOException) {
            null to "$directory: not readable: ${error.message}"
        }
        return StoredBundle(name, directory, filesOf(directory), bundle, problem)
    }

    /** Removes a bundle. Whoever has it open keeps what is mapped, and must not load from it again. */
    fun delete(name: String) {
        // Renamed first, so that a deletion that is broken off leaves no half bundle under the name.
        val doomed = root.resolve(".$name.deleted")
        doomed.toFile().deleteRecursively()
        Files.move(directory(name), doomed, StandardCopyOption.ATOMIC_MOVE)
        doomed.toFile().deleteRecursively()
    }

    /** Downloads that were broken off and can go on. */
    fun paused(): List<PausedDownload> =
        children { it.isDirectory && it.name.startsWith(".") && it.name.endsWith(PARTIAL) }.mapNotNull { directory ->
            val name = directory.name.removePrefix(".").removeSuffix(PARTIAL)
            val url = arrival(name).url ?: return@mapNotNull null
            PausedDownload(name, url, filesOf(directory.toPath()).values.sum())
        }

    /** Gives up a download that was broken off. */
    fun discard(name: String) = arrival(name).discard()

    /** A name for a new bundle, from what a person or an address calls it, that no other bundle has. */
    fun unusedName(wanted: String): String {
        val plain = wanted.map { if (it in NAME_CHARACTERS) it else '-' }.joinToString("").trim('-', '.').take(MAX_NAME)
        val base = plain.ifEmpty { "bundle" }
        return generateSequence(1) { it + 1 }
            .map { if (it == 1) base else "$base-$it" }
            .first { !Files.exists(directory(it)) }
    }

    internal fun directory(name: String): Path {
        if (name.isEmpty() || name.startsWith(".") || name.any { it !in NAME_CHARACTERS }) {
            throw InputError("'$name' is not a bundle's name; letters, digits, '.', '-' and '_' are")
        }
        return root.resolve(name)
    }

    internal fun arrival(name: String) = Arrival(root.resolve(".$name$PARTIAL"), directory(name))

    /** SpaceError where the storage does not hold that many more bytes. */
    internal fun requireRoom(bytes: Long) {
        val free = freeBytes()
        if (bytes > free) throw SpaceError(bytes, free)
    }

    private fun children(wanted: (File) -> Boolean): List<File> =
        root.toFile().listFiles().orEmpty().filter(wanted).sortedBy { it.name }

    private companion object {
        const val PARTIAL = ".partial"
        const val MAX_NAME = 80
        val NAME_CHARACTERS = ('a'..'z') + ('A'..'Z') + ('0'..'9') + listOf('.', '-', '_')
    }
}

/** The sizes of all files under a directory by their paths in it. */
internal fun filesOf(directory: Path): Map<String, Long> {
    val root = directory.toFile()
    return root.walkTopDown().filter { it.isFile }.associate { it.relativeTo(root).invariantSeparatorsPath to it.length() }
}
