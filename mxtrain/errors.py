"""The exception for a wrong setting, and its exit status."""

CONFIG_ERROR_STATUS = 2
"""Exit status of a worker, and of ``mxtrain``, after a ``ConfigError``"""


class ConfigError(ValueError):
    """A setting is wrong; the message says enough to fix it.

    The message names the field, its value and the allowed values. Entry points print it
    without a traceback and exit with status 2; a library user sees an ordinary ``ValueError``.
    """


def require_one_of(field: str, value, allowed) -> None:
    """Raise ConfigError unless ``value`` is one of ``allowed``: equal and of the same type, so that True is not 1."""
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        choices = ", ".join(repr(a) for a in allowed)
        raise ConfigError(f"{field} = {value!r} is not one of: {choices}")


def require_positive_integer(field: str, value) -> None:
    """Raise ConfigError unless ``value`` is an integer of at least 1; True is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{field} = {value!r} is not an integer of at least 1")
