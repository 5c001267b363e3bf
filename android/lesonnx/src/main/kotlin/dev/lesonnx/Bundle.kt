package dev.lesonnx

import java.io.IOException
import java.nio.ByteBuffer
import java.nio.charset.CharacterCodingException
import java.nio.file.FileSystemException
import java.nio.file.Files
import java.nio.file.NoSuchFileException
import java.nio.file.Path
import java.security.MessageDigest
import java.util.Locale
import java.util.stream.Collectors
import kotlin.io.path.isDirectory
import kotlin.io.path.isRegularFile
import kotlin.io.path.name

/**
 * One expert of a bundle. [number] counts all, layer by layer, a layer's shared one after its routed ones. [expertIdx] is
 * null for a shared expert; [offsetBytes] is where it starts in its layer's pack.
 */
data class Expert(
    val number: Int,
    val layerIdx: Int,
    val expertIdx: Int?,
    val kind: ExpertKind,
    val kindIdx: Int,
    val offsetBytes: Long,
) {
    /** What it takes in the cache and on flash. */
    val costBytes: Long get() = kind.costBytes

    override fun toString(): String = "layer $layerIdx ${if (expertIdx == null) "shared expert" else "expert $expertIdx"}"
}

/**
 * A bundle on disk: its manifest, its files, and whether they are whole. Immutable after construction, safe to share between
 * threads; it holds no file open and knows no session.
 *
 * Opening reads the manifest and looks at every file that it names: BundleError for one that is missing, has another size, or
 * is a link that leads out of the bundle. What is in the files, [verify] compares.
 */
class Bundle(val directory: Path) {
    val manifest: BundleManifest

    /** Every expert by its number. */
    val experts: List<Expert>

    private val layers: Map<Int, ExpertLayer>
    private val realDirectory: Path

    init {
        if (!directory.isDirectory()) throw BundleError("$directory: no such bundle directory")
        val path = directory.resolve("manifest.json")
        if (!Files.exists(path)) throw BundleError("$directory: not a bundle, it holds no manifest.json")
        realDirectory = directory.toRealPath()
        manifest = BundleManifest.parse(readText(file(path.name)), path.toString())
        layers = manifest.expertLayers.associateBy { it.layerIdx }
        experts = listExperts()
        checkFiles()
    }

    private fun checkFiles() {
        for (part in manifest.allParts) file(part.path)
        for (path in manifest.twins?.paths.orEmpty()) file(path)
        manifest.vision?.let { vision -> for (path in vision.parts.map { it.path } + vision.data) file(path) }
        for (kind in manifest.expertKinds) if (kind.stage != null) file(kind.stage)
        for (layer in manifest.expertLayers) {
            val pack = file(layer.pack)
            val found = Files.size(pack)
            val expected = packBytes(layer)
            if (found != expected) {
                throw BundleError("$pack: has ${grouped(found)} bytes, expected ${grouped(expected)}; export again")
            }
        }
        // Thousands of small files: one listing a layer instead of a look at each.
        val plain = layers.keys.associateWith { plainNames(packFile(it).parent) }
        for (expert in experts) {
            val path = modelFile(expert)
            if (path.name !in plain.getValue(expert.layerIdx)) file(directory.relativize(path).toString())
        }
    }

    private fun plainNames(directory: Path): Set<String> = Files.newDirectoryStream(directory).use { entries ->
        entries.filterNot(Files::isSymbolicLink).mapTo(HashSet()) { it.name }
    }

    /** A file of the bundle; BundleError where it is missing or a link leads out of the bundle. */
    fun file(relative: String): Path {
        val path = directory.resolve(relative)
        val real = try {
            path.toRealPath()
        } catch (_: NoSuchFileException) {
            throw BundleError("$path: missing from the bundle")
        } catch (_: IOException) {
            throw BundleError("$path: a link that leads nowhere, or a file that cannot be reached")
        }
        if (!real.startsWith(realDirectory)) throw BundleError("$path: leads out of the bundle")
        if (!real.isRegularFile()) throw BundleError("$path: missing from the bundle")
        return path
    }

    fun partFile(part: Part): Path = file(part.path)

    // ---- experts

    private fun listExperts(): List<Expert> {
        val experts = ArrayList<Expert>()
        val kinds = manifest.expertKinds
        for (layer in manifest.expertLayers) {
            val kind = kinds[layer.kind]
            for (expertIdx in 0 until layer.numExperts) {
                val offset = expertIdx * kind.costBytes
                experts.add(Expert(experts.size, layer.layerIdx, expertIdx, kind, layer.kind, offset))
            }
            if (layer.sharedKind != null) {
                val offset = layer.numExperts * kind.costBytes
                val shared = kinds[layer.sharedKind]
                experts.add(Expert(experts.size, layer.layerIdx, null, shared, layer.sharedKind, offset))
            }
        }
        return experts
    }

    /** The layer of that index; NoSuchElementException where it has no experts. */
    fun layer(layerIdx: Int): ExpertLayer = layers.getValue(layerIdx)

    fun packFile(layerIdx: Int): Path = directory.resolve(layer(layerIdx).pack)

    /** An expert's own .onnx. */
    fun modelFile(expert: Expert): Path {
        val name =
            if (expert.expertIdx == null) "shared.onnx" else "expert_%03d.onnx".format(Locale.ROOT, expert.expertIdx)
        return packFile(expert.layerIdx).resolveSibling(name)
    }

    fun packBytes(layer: ExpertLayer): Long = layer.numExperts * manifest.expertKinds[layer.kind].costBytes + sharedBytes(layer)

    /** All experts together. */
    val expertBytes: Long get() = manifest.expertLayers.sumOf(::packBytes)

    /** What one token needs of a layer: k experts and the shared one. */
    fun layerDemandBytes(layer: ExpertLayer): Long =
        layer.numExpertsPerTok * manifest.expertKinds[layer.kind].costBytes + sharedBytes(layer)

    private fun sharedBytes(layer: ExpertLayer): Long = layer.sharedKind?.let { manifest.expertKinds[it].costBytes } ?: 0

    /** The least expert budget: the largest layer's demand. */
    val leastBudgetBytes: Long get() = manifest.expertLayers.maxOf(::layerDemandBytes)

    /** What one token needs of all layers; under this a cache cannot hold from one token to the next. */
    val tokenDemandBytes: Long get() = manifest.expertLayers.sumOf(::layerDemandBytes)

    // ---- integrity

    /**
     * Compares every file with `checksums.json`; gives their number. [progress] hears of bytes as they are read; what it
     * throws ends the comparison. BundleError names the first file that differs. Takes as long as reading all of it does.
     */
    fun verify(progress: (Long) -> Unit = {}): Int {
        val entries = Checksums.read(file(Checksums.FILE))
        val present = Files.walk(realDirectory).use { paths ->
            // A link to a directory is not walked into: it counts as a file, one that nobody named.
            paths.filter { Files.isSymbolicLink(it) || !Files.isDirectory(it) }
                .map { path -> realDirectory.relativize(path).joinToString("/") }
                .collect(Collectors.toList())
        }
        val unnamed = (present - entries.keys - Checksums.FILE).minOrNull()
        if (unnamed != null) throw BundleError("${directory.resolve(unnamed)}: is not named in checksums.json")
        for ((name, entry) in entries) {
            val path = file(name)
            val found = Files.size(path)
            if (found != entry.sizeBytes) {
                val expected = grouped(entry.sizeBytes)
                throw BundleError("$path: has ${grouped(found)} bytes, checksums.json says $expected")
            }
            if (sha256(path, progress) != entry.sha256) {
                throw BundleError("$path: SHA-256 differs from checksums.json; the file is corrupt")
            }
        }
        return entries.size
    }

    private fun sha256(path: Path, progress: (Long) -> Unit): String {
        val digest = MessageDigest.getInstance("SHA-256")
        try {
            Files.newInputStream(path).use { input ->
                val block = ByteArray(READ_BYTES)
                while (true) {
                    val count = input.read(block)
                    if (count < 0) break
                    digest.update(block, 0, count)
                    progress(count.toLong())
                }
            }
        } catch (error: IOException) {
            throw BundleError("$path: not readable: ${oneLine(error)}", error)
        }
        return digest.digest().joinToString("") { "%02x".format(Locale.ROOT, it) }
    }

    private companion object {
        const val READ_BYTES = 1 shl 20
    }
}

/** A text file of a bundle, in UTF-8; BundleError where it cannot be read or is none. */
internal fun readText(path: Path): String = try {
    // Not Files.readString, which Android has from API 33 on only.
    Charsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(Files.readAllBytes(path))).toString()
} catch (_: CharacterCodingException) {
    throw BundleError("$path: not readable: it is not text in UTF-8")
} catch (error: IOException) {
    throw BundleError("$path: not readable: ${(error as? FileSystemException)?.reason ?: oneLine(error)}", error)
}

/** A number with its thousands parted by commas, as the messages of all hosts have it. */
internal fun grouped(number: Long): String = "%,d".format(Locale.ROOT, number)
