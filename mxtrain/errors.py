"""The exception for a wrong setting, and its exit status."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral

CONFIG_ERROR_STATUS = 2
"""Exit status of a worker, and of ``mxtrain``, after a ``ConfigError``"""


class ConfigError(ValueError):
    """A setting is wrong; the message says enough to fix it.

    The message begins with the name of the setting ("training.steps" in a job, "p" in Python), its value and the
    allowed values. Entry points print it without a traceback and exit with status 2; a library user sees an ordinary
    ``ValueError``. A message of more than 2,000 characters, from an enormous value, keeps only both ends.
    """

    def __init__(self, message: str):
        super().__init__(message if len(message) <= 2000 else f"{message[:1000]} ... {message[-1000:]}")


@contextmanager
def errors_begin_with(words: str) -> Iterator[None]:
    """Put ``words`` before the message of a ConfigError that is raised inside of the context."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{words}{error}") from None


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, or the error's type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def raised_as(problem: str) -> Iterator[None]:
    """Turn errors into a ConfigError that begins with ``problem``: networks and readers raise many types."""
    try:
        yield
    except (ConfigError, BrokenPipeError):  # nobody reads what is printed
        raise
    except Exception as error:
        raise ConfigError(f"{problem}: {type(error).__name__}: {one_line(error)}") from error


def setting_in(message: str) -> str:
    """The full name of the setting that a ConfigError's message begins with, such as "mxnorm.schedule[1].recipe".

    Empty if there is none.
    """
    name = re.match(r"[a-z_0-9]+(\.[a-z_0-9]+(\[\d+\])?)*", message)
    return name[0] if name else ""


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the name among ``names`` that is most like ``name``; empty if ``difflib`` finds none above ``cutoff``."""
    return next(iter(get_close_matches(name, sorted(names), n=1, cutoff=cutoff)), "")


def require_one_of(field: str, value, allowed) -> None:
    """Raise ConfigError unless ``value`` equals one of ``allowed`` and has the same type, so that True is not 1."""
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        choices = ", ".join(repr(a) for a in allowed)
        raise ConfigError(f"{field} = {value!r} is not one of: {choices}")


def require_positive_integer(field: str, value) -> None:
    """Raise ConfigError unless ``value`` is an integer of at least 1. ``True`` is rejected."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:  # NumPy's integers, too
        raise ConfigError(f"{field} = {value!r} is not an integer of at least 1")
