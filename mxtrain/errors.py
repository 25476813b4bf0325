"""The one exception for mistakes in a user's setting."""


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
