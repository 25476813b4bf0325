"""The fields of a job config by their full names, and the check of one value."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from mxtrain.errors import ConfigError


@dataclass(frozen=True)
class Field:
    """One setting.

    Attributes:
        name: its full name, "training.steps".
        type: its type, with the allowed values.
        default: its value where nothing is given.
    """

    name: str
    type: Any
    default: Any

    def checked(self, value):
        """Return a value from a TOML file: of the exact type, and in range.

        An integer may stand for a float, and what TOML lacks is written as in JSON: a list stands for a tuple or a
        set, and a string for a path or an enumeration's value.

        Raises:
            ConfigError: says what is allowed.
        """
        return self._check(value, lambda: _strictly(TypeAdapter(self.type), value))

    def parsed(self, text: str):
        """Return the value that ``text``, from the command line, stands for; raises as ``checked`` does."""
        core, optional = _core(self.type)
        if optional and text == "None":
            return None
        if get_origin(core) is list or list in map(get_origin, get_args(core)):
            return self.checked([word.strip() for word in text.split(",") if word.strip()])
        if get_origin(core) is Literal and all(isinstance(choice, int) for choice in get_args(core)):
            core = int
        if core is str or get_origin(core) is Literal:
            return self.checked(text)
        return self.checked(self._check(text, lambda: TypeAdapter(core).validate_strings(text)))

    def parsed_words(self, words: list | dict):
        """Return the list or table that ``words``, from the command line, stand for; raises as ``checked`` does."""
        return self._check(words, lambda: TypeAdapter(self.type).validate_python(words))

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false, so that its flag needs no value."""
        return _core(self.type)[0] is bool

    @property
    def flags(self) -> list[str]:
        """The flags that set it."""
        section, _, last = self.name.rpartition(".")
        return [f"--{self.name}", *([f"--{section}.no_{last}"] if self.is_switch else [])]

    @property
    def choices(self) -> tuple[str, ...]:
        """All its values, as on the command line; empty if there are too many."""
        core = _core(self.type)[0]
        return tuple(map(str, get_args(core))) if get_origin(core) is Literal else ()

    @property
    def placeholder(self) -> str:
        """What stands for its value in the help."""
        core = _core(self.type)[0]
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        if self.is_table:
            return "NAME VALUE ..."
        if self.takes_words:
            return "VALUE ..."
        if get_origin(core) is list:
            return "A,B,..."
        return {int: "INTEGER", float: "NUMBER"}.get(core, "TEXT")

    @property
    def is_table(self) -> bool:
        return get_origin(_core(self.type)[0]) is dict

    @property
    def takes_words(self) -> bool:
        """Whether its flag takes any number of words, as lists do except those of names, which are one word."""
        core = _core(self.type)[0]
        return (get_origin(core) or core) in (list, tuple, set) and not self.is_list_of_names

    @property
    def is_list_of_names(self) -> bool:
        core = _core(self.type)[0]
        return get_origin(core) is list and (get_args(core)[0] is str or get_origin(get_args(core)[0]) is Literal)

    @property
    def is_list_of_lists(self) -> bool:
        core = _core(self.type)[0]
        return get_origin(core) is list and get_origin(get_args(core)[0]) is list

    def _check(self, value, validate):
        try:
            result = validate()
        except ValidationError as error:
            what = error.errors()[0]
            problem = what["msg"].removeprefix("Value error, ").removeprefix("Input ").partition(", unable")[0]
            where, part = _part_at(what["loc"], value, what["input"])
            raise ConfigError(f"{self.name}{where} = {part!r} {problem}") from None
        if isinstance(value, (bool, float)) and isinstance(result, int) and type(result) is not type(value):
            raise ConfigError(f"{self.name} = {value!r} should be a valid integer")  # a Literal takes True for 1
        return result


def _strictly(adapter: TypeAdapter, value):
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError):  # wrong, which is said in Python's words, or a date
        return adapter.validate_python(value, strict=True)


def _part_at(path: tuple, value, part) -> tuple[str, Any]:
    """The place and the value that pydantic's ``path`` leads to in a list or table; it also names types of a union.

    ``part`` is the wrong value as pydantic read it: a part of an inline table, which ``value`` has as text.
    """
    where = ""
    for step in path:
        if isinstance(value, list) and isinstance(step, int):
            where, value = f"{where}[{step}]", value[step]
        elif isinstance(value, dict) and step in value:
            # A table's keys may be any text, and an entry's keys are names.
            where, value = f"{where}.{step if where else repr(step)}", value[step]
        elif isinstance(value, str) and value.startswith("{"):
            where, value = f"{where}.{step}", part
    return where, value


def fields_of(job_config: type, section: str = "") -> dict[str, Field]:
    """Every field of a job config and of its sections, by full name."""
    found = {}
    for f in fields(job_config):
        name = f"{section}.{f.name}".removeprefix(".")
        if is_dataclass(f.type):
            found |= fields_of(f.type, name)
        else:
            default = f.default_factory() if f.default is MISSING else f.default
            found[name] = Field(name, f.type, default)
    return found


def unknown(name: str, known: Mapping[str, Field]) -> ConfigError:
    """The error for a setting that does not exist, with the closest one that does."""
    last = name.rpartition(".")[2]
    same_name_elsewhere = [other for other in known if other.rpartition(".")[2] == last]
    close = same_name_elsewhere or get_close_matches(name, known, n=1) or _close_last(name, known)
    hint = f"; the closest is {close[0]}" if close else ""
    return ConfigError(f"{name} is not a setting{hint}")


def _close_last(name: str, known: Mapping[str, Field]) -> list[str]:
    by_last = {other.rpartition(".")[2]: other for other in known}
    return [by_last[last] for last in get_close_matches(name.rpartition(".")[2], by_last, n=1)]


def _core(annotation) -> tuple[Any, bool]:
    """A type without its limits, and whether None is allowed: Annotated[int, Ge(1)] | None -> (int, True)."""
    if get_origin(annotation) is Annotated:
        return _core(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        others = [part for part in get_args(annotation) if part is not type(None)]
        if len(others) == 1:
            return _core(others[0])[0], len(others) < len(get_args(annotation))
        return annotation, len(others) < len(get_args(annotation))
    return annotation, False
