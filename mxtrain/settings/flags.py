"""The command line as settings: ``--training.steps 100``, ``--training.steps=100``, ``--checkpoint.enable``."""

from collections.abc import Mapping

from mxtrain.errors import ConfigError
from mxtrain.settings.fields import Field, unknown


def flag_values(words: list[str], known: Mapping[str, Field]) -> dict:
    """Return full name -> value of every flag; the last of two flags counts.

    The rules are those of TorchTitan: "-" and "_" in names are the same, ``--section.no-name`` is false, a list of
    names is one word with commas, any other list is words, and a table is words in pairs.

    Raises:
        ConfigError: for an unknown flag, a missing, wrong or additional value, or a word that belongs to no flag.
    """
    values = {}
    while words:
        flag, *words = words
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} belongs to no flag: write --section.name value")
        name, equals, text = flag[2:].partition("=")
        count = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        given, words = ([text], words) if equals else (words[:count], words[count:])
        field, is_off = _field(name.replace("-", "_"), known)
        values[field.name] = _value(field, given, is_off)
    return values


def _field(name: str, known: Mapping[str, Field]) -> tuple[Field, bool]:
    """The field that a flag sets, and whether the flag switches it off."""
    if name in known:
        return known[name], False
    section, _, last = name.rpartition(".")
    positive = f"{section}.{last.removeprefix('no_')}"
    if last.startswith("no_") and positive in known and known[positive].is_switch:
        return known[positive], True
    raise unknown(name, known)


def _value(field: Field, words: list[str], is_off: bool):
    if field.is_table:
        if len(words) % 2:
            raise ConfigError(f"{field.name} takes pairs of a name and a value, not: {' '.join(words)}")
        return field.parsed_words(dict(zip(words[::2], words[1::2])))
    if field.takes_words and words != ["None"]:
        return field.parsed_words([word.split(",") for word in words] if field.is_list_of_lists else words)
    if is_off and words:
        raise ConfigError(f"{field.name} takes no value after --{field.name.replace('.', '.no-')}")
    if field.is_switch and not words:
        return not is_off
    if not words:
        raise ConfigError(f"{field.name} needs a value")
    if len(words) > 1:
        as_one = f"one word with commas, such as {','.join(word.strip(',') for word in words)}"
        takes = as_one if field.is_list_of_names else "one value"
        raise ConfigError(f"{field.name} takes {takes}, not: {' '.join(words)}")
    return field.parsed(words[0])
