"""The flag ``--resume RUN``, for the command and for a worker. Imports nothing heavy."""

FLAG = "--resume"


def separated(arguments: list[str]) -> list[str]:
    """Return ``arguments`` with ``--resume=RUN`` as two words."""
    words = []
    for word in arguments:
        name, equals, value = word.partition("=")
        words += [name, value] if equals and name == FLAG else [word]
    return words
