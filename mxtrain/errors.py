"""The exception for a wrong setting, and the exit status that follows from it."""

CONFIG_ERROR_STATUS = 2
"""Exit status of a worker, and of ``mxtrain``, after a ``ConfigError``"""


class ConfigError(ValueError):
    """A setting is wrong, and the message alone is enough to mend it.

    The message names the field, the value given, and the values allowed. Entry points print it
    without a traceback and exit with status 2; a library user sees an ordinary ``ValueError``.
    """


def require_one_of(field: str, value, allowed) -> None:
    """Raise ConfigError unless ``value`` is one of ``allowed`` (compared with ``==``)."""
    if value not in tuple(allowed):
        choices = ", ".join(repr(a) for a in allowed)
        raise ConfigError(f"{field} = {value!r} is not one of: {choices}")
