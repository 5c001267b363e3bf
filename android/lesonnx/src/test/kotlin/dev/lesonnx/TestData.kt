package dev.lesonnx

import java.nio.file.Files
import java.nio.file.Path
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonElement

/** Where tests find what the Python side wrote. */
internal object TestData {
    /** The repository. */
    val root: Path = generateSequence(Path.of("").toAbsolutePath()) { it.parent }
        .first { Files.isDirectory(it.resolve("tests/data/traces")) }

    val data: Path = root.resolve("tests/data")

    /** Bundles and what the Python runner gives for them: `tools/make_mobile_fixtures.py` makes them. */
    val mobile: Path = Path.of(System.getenv("LESONNX_MOBILE") ?: root.resolve("build/mobile").toString())

    fun json(path: Path): JsonElement = Json.parseToJsonElement(Files.readString(path))
}
