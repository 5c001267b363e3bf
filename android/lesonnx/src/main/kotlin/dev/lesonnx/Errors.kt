package dev.lesonnx

/**
 * The errors that a user can cause or meet; the tree of `lesonnx/errors.py`. Every message is one line: the thing, what
 * was expected, what was found. A `LesonnxError` that is none of the classes below is a failure while working.
 */
open class LesonnxError(message: String, cause: Throwable? = null) : Exception(message, cause)

/** Bad usage or bad input. */
open class InputError(message: String, cause: Throwable? = null) : LesonnxError(message, cause)

/** A bundle that cannot be run: a missing or corrupt file, a wrong version, a path that leaves it. */
class BundleError(message: String, cause: Throwable? = null) : InputError(message, cause)

/** A memory budget under the least that the bundle needs. */
class BudgetError(message: String) : InputError(message)

/** A prompt or request that does not fit the model's context. */
class ContextError(message: String) : InputError(message)

/** An expert that could not be read, twice. */
class LoadError(message: String, cause: Throwable? = null) : LesonnxError(message, cause)

/** An event that cannot happen in the scheduler's state: a fault of its host. */
class ScheduleError(message: String) : LesonnxError(message)

/** A foreign error as one line of at most 200 characters. */
internal fun oneLine(error: Throwable): String = oneLine(error.message ?: error.javaClass.simpleName)

internal fun oneLine(message: String): String = message.trim().split(Regex("\\s+")).joinToString(" ").take(200)
