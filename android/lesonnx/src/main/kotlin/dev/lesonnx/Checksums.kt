package dev.lesonnx

import java.nio.file.Path
import kotlinx.serialization.SerializationException
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.JsonPrimitive
import kotlinx.serialization.json.longOrNull

/** `checksums.json`: the size and SHA-256 of every other file of a bundle. */
object Checksums {
    const val FILE = "checksums.json"

    /** What a file must be; [sha256] in lower-case hexadecimal. */
    data class Entry(val sizeBytes: Long, val sha256: String)

    /** By path, in the order of the file. BundleError for anything in it that is not as the format says. */
    fun read(path: Path): Map<String, Entry> = parse(readText(path), path.toString())

    /** As [read], from a text; [source] begins the messages. */
    fun parse(text: String, source: String): Map<String, Entry> {
        val document = try {
            Json.parseToJsonElement(text)
        } catch (error: SerializationException) {
            throw BundleError("$source: not readable as JSON: ${oneLine(error)}")
        } catch (_: StackOverflowError) {
            throw BundleError("$source: not readable as JSON: nested too deeply")
        }
        if (document !is JsonObject || document.keys != setOf("algorithm", "files") || document["algorithm"] != SHA256) {
            throw BundleError("$source: expected an object of algorithm, which is sha256, and files")
        }
        if (!text.endsWith("}\n")) throw BundleError("$source: does not end in a line's end; the file is cut off")
        val files = document["files"] as? JsonObject ?: throw BundleError("$source: files: expected an object")
        return files.mapValues { (name, entry) ->
            if (!staysInside(name)) throw BundleError("$source: path '$name' must be relative and stay inside the bundle")
            entry(entry) ?: throw BundleError("$source: $name: expected size_bytes and sha256")
        }
    }

    private fun entry(json: JsonElement): Entry? {
        if (json !is JsonObject || json.keys != setOf("size_bytes", "sha256")) return null
        val size = (json["size_bytes"] as? JsonPrimitive)?.takeIf { !it.isString }?.longOrNull ?: return null
        val digest = (json["sha256"] as? JsonPrimitive)?.takeIf { it.isString }?.content ?: return null
        return Entry(size, digest)
    }

    private val SHA256 = JsonPrimitive("sha256")
}
