"""One setting, with the check of its value, and the values of all settings of a job."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cached_property
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from mxtrain.errors import ConfigError
from mxtrain.settings.removed import SETTINGS
from mxtrain.settings.types import Resume


@dataclass(frozen=True)
class Field:
    """One setting.

    Attributes:
        name: its full name, "training.steps".
        type: its type, with the allowed values.
        default: its value where nothing is given.
        resume: what a resumed run may do with it; None for a setting of the user's own module.
    """

    name: str
    type: Any
    default: Any
    resume: Resume | None = None

    def checked(self, value):
        """Return a value from a TOML file: of the exact type, and in range.

        An integer may stand for a float, and what TOML lacks is written as in JSON: a list stands for a tuple or a
        set, and a string for a path or an enumeration's value.

        Raises:
            ConfigError: says what is allowed.
        """
        result = self._check(value, lambda: _strictly(TypeAdapter(self.type), value))
        if isinstance(value, (bool, float)) and isinstance(result, int) and type(result) is not type(value):
            raise ConfigError(f"{self.name} = {value!r} should be a valid integer")  # a Literal takes True for 1
        return result

    def from_words(self, words: list[str]):
        """Return the value of the words after its flag; raises as ``checked`` does.

        A list of names is one word with commas, any other list is words, a table is words in pairs, and a switch needs
        no word.
        """
        kind, core = self.kind, _core(self.type)
        if kind == "switch" and not words:
            return True
        if words == ["None"] and type(None) in _parts(self.type):
            return None
        if kind in ("table", "words"):
            if kind == "table" and len(words) % 2:
                raise ConfigError(f"{self.name} takes pairs of a name and a value, not: {' '.join(words)}")
            value = dict(zip(words[::2], words[1::2])) if kind == "table" else words
            if get_origin(get_args(core)[0]) is list:
                value = [word.split(",") for word in words]
            return self._check(value, lambda: TypeAdapter(self.type).validate_python(value))
        if not words:
            raise ConfigError(f"{self.name} needs a value")
        if len(words) > 1:
            as_one = f"one word with commas, such as {','.join(word.strip(',') for word in words)}"
            takes = as_one if kind == "names" else "one value"
            raise ConfigError(f"{self.name} takes {takes}, not: {' '.join(words)}")
        (text,) = words
        if kind == "names":
            return self.checked([name.strip() for name in text.split(",") if name.strip()])
        if kind == "choice":
            return self.checked(next((choice for choice in get_args(core) if str(choice) == text), text))
        return self.checked(
            text if core is str else self._check(text, lambda: TypeAdapter(core).validate_strings(text))
        )

    @property
    def kind(self) -> str:
        """How its flag is written: "switch", "choice", "names" (one word with commas), "words", "table" or "value"."""
        core = _core(self.type)
        origin, items = get_origin(core) or core, get_args(core)
        if origin is list and items and (items[0] is str or get_origin(items[0]) is Literal):
            return "names"
        kinds = {bool: "switch", Literal: "choice", dict: "table", list: "words", tuple: "words", set: "words"}
        return kinds.get(origin, "value")

    @property
    def flags(self) -> list[str]:
        """The flags that set it."""
        section, _, last = self.name.rpartition(".")
        return [f"--{self.name}", *([f"--{section}.no_{last}"] if self.kind == "switch" else [])]

    @property
    def choices(self) -> tuple[str, ...]:
        """All its values, as on the command line; empty if there are too many."""
        return tuple(map(str, get_args(_core(self.type)))) if self.kind == "choice" else ()

    @property
    def placeholder(self) -> str:
        """What stands for its value in the help."""
        number = {int: "INTEGER", float: "NUMBER"}.get(_core(self.type), "TEXT")
        choices = f"{{{','.join(self.choices)}}}"
        words = {"switch": "", "names": "A,B,...", "words": "VALUE ...", "table": "NAME VALUE ...", "choice": choices}
        return words.get(self.kind, number)

    def _check(self, value, validate):
        try:
            return validate()
        except ValidationError as error:
            first = error.errors()[0]
            problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ").partition(", unable")[0]
            # A list's index, an entry's key, or a table's key, which may be any text.
            where = "".join(
                f"[{step}]" if isinstance(step, int) else f".{step if step.isidentifier() else repr(step)}"
                for step in first["loc"]
            )
            raise ConfigError(f"{self.name}{where} = {first['input']!r} {problem}") from None


@dataclass(frozen=True)
class Settings:
    """Values by full name: ``settings["training.steps"]`` is the given value, or the default.

    Attributes:
        known: every setting that exists.
        given: the values from the TOML file and the flags.
    """

    known: Mapping[str, Field]
    given: Mapping[str, object]

    def __getitem__(self, name: str):
        return self.given[name] if name in self.given else self.known[name].default

    @cached_property
    def values(self) -> SimpleNamespace:
        """All values as attributes: ``values.training.steps``."""
        return _namespace(_nested({name: self[name] for name in self.known}))

    def changed(self, name: str) -> bool:
        """Whether a value is another than the default."""
        return self[name] != self.known[name].default

    def tables(self) -> dict:
        """The given values as nested tables, as in a TOML file."""
        return _nested(self.given)


Problems = Iterator[tuple[str, str]]
"""Names of settings, each with what is wrong with it and what is allowed"""


def raise_first(problems: Problems, settings: Settings) -> None:
    """Raise ConfigError for the first of the ``problems``, if there is one."""
    for name, problem in problems:
        raise ConfigError(f"{name} = {settings[name]!r} {problem}")


class _Tables(dict):
    """Nested tables; a plain dict in one is a value."""


def _nested(values: Mapping[str, object]) -> dict:
    root = _Tables()
    for name, value in values.items():
        *sections, last = name.split(".")
        table = root
        for section in sections:
            table = table.setdefault(section, _Tables())
        table[last] = value
    return root


def flat(tables: Mapping, known: Mapping[str, Field], section: str = "") -> Iterator[tuple[str, object]]:
    """Full name and value of everything in nested tables; of an unknown table, its name and the table."""
    for key, value in tables.items():
        name = f"{section}.{key}".removeprefix(".")
        if name not in known and isinstance(value, dict) and any(other.startswith(f"{name}.") for other in known):
            yield from flat(value, known, name)
        else:
            yield name, value


def _namespace(tables: dict) -> SimpleNamespace:
    return SimpleNamespace(**{k: _namespace(v) if isinstance(v, _Tables) else v for k, v in tables.items()})


def fields_of(job_config: type, section: str = "", own: bool = False) -> dict[str, Field]:
    """Every field of a job config and of its sections, by full name.

    Args:
        own: the classes are mxtrain's: each says in ``resume`` what holds for its fields, and the type of a field may
            say what holds for this one.
    """
    found = {}
    for f in fields(job_config):
        name = f"{section}.{f.name}".removeprefix(".")
        if is_dataclass(f.type):
            found |= fields_of(f.type, name, own)
        else:
            default = f.default_factory() if f.default is MISSING else f.default
            found[name] = Field(name, f.type, default, rule_in(f.type, job_config.resume) if own else None)
    return found


def rule_in(annotation, resume: Resume) -> Resume:
    """What a type says about resumed runs; ``resume`` where it says nothing."""
    metadata = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((part for part in metadata if isinstance(part, Resume)), resume)


def unknown(name: str, known: Mapping[str, Field]) -> ConfigError:
    """The error for a setting that does not exist, with what to do instead, or the closest one that does."""
    for removed, instead in SETTINGS.items():
        if f"{name}.".startswith(f"{removed}."):
            return ConfigError(f"{name} no longer exists: {instead}")
    last = name.rpartition(".")[2]
    by_last = {other.rpartition(".")[2]: other for other in known}
    same_name_elsewhere = [other for other in known if other.rpartition(".")[2] == last]
    close = same_name_elsewhere or get_close_matches(name, known, n=1)
    close = close or [by_last[other] for other in get_close_matches(last, by_last, n=1)]
    return ConfigError(f"{name} is not a setting{f'; the closest is {close[0]}' if close else ''}")


def _strictly(adapter: TypeAdapter, value):
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError):  # wrong, which is said in Python's words, or a date
        return adapter.validate_python(value, strict=True)


def _parts(annotation) -> list:
    """The members of a union, or the type alone, without limits."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    return list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]


def _core(annotation):
    """A type without its limits and without None: Annotated[int, Ge(1)] | None -> int."""
    if get_origin(annotation) is Annotated:
        return _core(get_args(annotation)[0])
    others = [part for part in _parts(annotation) if part is not type(None)]
    return annotation if len(others) > 1 or others == [annotation] else _core(others[0])
