package dev.lesonnx.app

import dev.lesonnx.jvm.JvmPlatform
import java.io.File
import java.nio.file.Path

/** What `tools/make_mobile_fixtures.py` made, and the expert kernel as `make setup` builds it. */
object Fixtures {
    private val root: File = generateSequence(File("").absoluteFile) { it.parentFile }.first { File(it, "tests/data/traces").isDirectory }
    private val mobile = System.getenv("LESONNX_MOBILE")?.let(::File) ?: File(root, "build/mobile")

    /** A trained model of 8 million parameters, experts in 4 bits. */
    val sample: File = File(mobile, "bundles/sample-int4").also {
        check(it.isDirectory) { "$it: no such bundle; run tools/make_mobile_fixtures.py" }
    }

    /** Copies the sample with its drafter to [target]. */
    fun copyDrafting(target: File): File {
        File(mobile, "bundles/sample-dspark-int4").copyRecursively(target)
        return target
    }

    /** Copies a bundle that takes pictures to [target]; it has a chat format. */
    fun copyPictured(target: File): File {
        File(mobile, "bundles/minicpmv4_7-float").copyRecursively(target)
        return target
    }

    /** A picture of 240 by 200 pixels or so that comes with that bundle's checkpoint. */
    val wide: File = File(root, "tests/data/checkpoints/minicpmv4_7_moe/images/wide.png")

    val kernel: Path = (System.getenv("LESONNX_LIBRARY")?.let(::File) ?: File(root, "lesonnx/native/liblesonnx.so")).toPath()

    val platform get() = JvmPlatform(kernel)

    /** Copies the sample to [target]; with a chat format if [hasChat]. */
    fun copySample(target: File, hasChat: Boolean = false): File {
        sample.copyRecursively(target)
        if (hasChat) {
            val manifest = File(target, "manifest.json")
            val format = """"chat_format": {"start": "", "messages": {"user": {"prefix": "", "suffix": ""},""" +
                """ "assistant": {"prefix": "", "suffix": "\n"}}, "answer": ""}"""
            val text = manifest.readText().replace(Regex(",\\s*\"chat_format\": null"), "")
            val changed = text.replace("\"tokenizer\": {", "\"tokenizer\": {\n  $format,")
            check(changed != text) { "$manifest: has no tokenizer" }
            manifest.writeText(changed)
        }
        return target
    }
}
