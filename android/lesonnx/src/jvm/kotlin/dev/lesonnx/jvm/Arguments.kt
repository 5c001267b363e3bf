package dev.lesonnx.jvm

import dev.lesonnx.InputError

/**
 * A command's arguments: `--name value` or `--name=value` for the options in [withValue], `--name` for the [flags], the rest
 * in order. Each option has one name; [aliases] are further spellings. InputError names what is wrong.
 */
internal class Arguments(
    arguments: List<String>,
    withValue: Set<String>,
    flags: Set<String>,
    aliases: Map<String, String> = emptyMap(),
) {
    /** What is no option. */
    val rest: List<String>

    private val values = HashMap<String, MutableList<String>>()

    init {
        val rest = ArrayList<String>()
        val waiting = ArrayDeque(arguments)
        while (waiting.isNotEmpty()) {
            val argument = waiting.removeFirst()
            if (!argument.startsWith("--")) {
                rest.add(argument)
                continue
            }
            val given = argument.substringBefore("=")
            val name = aliases[given] ?: given
            val value = when (name) {
                in flags -> if (argument == given) "" else throw InputError("option $given takes no value")
                in withValue ->
                    if (argument != given) argument.substringAfter("=")
                    else waiting.removeFirstOrNull() ?: throw InputError("option $given requires an argument")
                else -> throw InputError("no such option: $given")
            }
            values.getOrPut(name, ::ArrayList).add(value)
        }
        this.rest = rest
    }

    fun has(name: String): Boolean = name in values

    /** The option as it was given last; null where it was not. */
    fun text(name: String): String? = values[name]?.last()

    /** The option as often as it was given. */
    fun all(name: String): List<String> = values[name].orEmpty()

    fun int(name: String): Int? = text(name)?.let { it.toIntOrNull() ?: throw noNumber(name, it, "a whole number") }

    fun unsigned(name: String): ULong? =
        text(name)?.let { it.toULongOrNull() ?: throw noNumber(name, it, "a whole number from 0 to 2**64 - 1") }

    fun double(name: String): Double? = text(name)?.let { it.toDoubleOrNull() ?: throw noNumber(name, it, "a number") }

    /** A size in bytes. */
    fun bytes(name: String): Long? = try {
        text(name)?.let(::parseBytes)
    } catch (error: InputError) {
        throw InputError("$name: ${error.message}")
    }

    /** True for `--name`, false for `--no-name`, null for neither; InputError for both. */
    fun switch(name: String): Boolean? {
        val off = "--no-" + name.removePrefix("--")
        if (has(name) && has(off)) throw InputError("$name and $off exclude each other")
        return if (has(name)) true else if (has(off)) false else null
    }

    private fun noNumber(name: String, value: String, expected: String) = InputError("$name is '$value', expected $expected")
}
