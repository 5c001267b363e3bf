"""The errors a user can cause or meet. Every message is one line: the thing, what was expected, what was found."""


class LesonnxError(Exception):
    """A failure while working: the command ends with exit code 1."""

    exit_code = 1


class InputError(LesonnxError):
    """Bad usage or bad input: the command ends with exit code 2."""

    exit_code = 2


class CheckpointError(InputError):
    """A checkpoint that cannot be exported: a file, tensor or config key missing, broken, misshapen or unexpected."""


class BundleError(InputError):
    """A bundle that cannot be run: a missing or corrupt file, a wrong version, a path that leaves it."""


class BudgetError(InputError):
    """A memory budget under the least that the bundle needs."""


class ContextError(InputError):
    """A prompt or request that does not fit the model's context."""


class LoadError(LesonnxError):
    """An expert that could not be read, twice."""


class ToleranceError(LesonnxError):
    """A bundle whose output is further from its reference than allowed."""
