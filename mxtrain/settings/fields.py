"""One setting, with the check of its value, and the values of all settings of a job."""

import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from mxtrain.errors import ConfigError
from mxtrain.settings.types import Resume


@dataclass(frozen=True)
class Field:
    """One setting.

    Attributes:
        name: its full name, "training.steps".
        type: its type, with the allowed values.
        default: its value where nothing is given.
        resume: what a resumed run may do with it; None for a setting of the user's own module.
        doc: the string below its declaration, on one line; empty where the source has none.
    """

    name: str
    type: Any
    default: Any
    resume: Resume | None
    doc: str = ""

    def checked(self, value):
        """Return a value from a TOML file: of the exact type, and in range.

        An integer may stand for a float, and what TOML lacks is written as in JSON: a list stands for a tuple or a
        set, and a string for a path or an enumeration's value.
        """
        result = self._check(lambda: _strictly(TypeAdapter(self.type), value))
        if isinstance(value, (bool, float)) and isinstance(result, int) and type(result) is not type(value):
            raise ConfigError(f"{self.name} = {value!r} should be a valid integer")  # a Literal takes True for 1
        return result

    def from_words(self, words: list[str]):
        """Return the value of the words after its flag.

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
            return self._check(lambda: TypeAdapter(self.type).validate_python(value))
        if not words:
            raise ConfigError(f"{self.name} needs a value; write --{self.name} VALUE")
        if len(words) > 1:
            as_one = f"one word with commas, such as {','.join(word.strip(',') for word in words)}"
            takes = as_one if kind == "names" else "one value"
            raise ConfigError(f"{self.name} takes {takes}, not: {' '.join(words)}")
        (text,) = words
        if kind == "names":
            return self.checked([name.strip() for name in text.split(",") if name.strip()])
        if kind == "choice":
            return self.checked(next((choice for choice in get_args(core) if str(choice) == text), text))
        return self.checked(text if core is str else self._check(lambda: TypeAdapter(core).validate_strings(text)))

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

    def _check(self, validate):
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


class _Table:
    def to_dict(self) -> dict:
        return asdict(self)


class Known(dict[str, Field]):
    """Every setting that exists, by full name."""

    @cached_property
    def job_config(self) -> type:
        """A dataclass with all settings as attributes, as TorchTitan's trainer takes them."""
        return _table(self)


def _table(known: Mapping[str, Field], kind: str = "JobConfig") -> type:
    """A dataclass with a field for every name, and one for every table of names with dots."""
    own, tables = [], {}
    for name, setting in known.items():
        table, dot, rest = name.partition(".")
        if dot:
            tables.setdefault(table, {})[rest] = setting
        else:
            own.append((name, setting.type, field(default_factory=partial(copy, setting.default))))
    sections = {name: _table(table, name) for name, table in tables.items()}
    own += [(name, section, field(default_factory=section)) for name, section in sections.items()]
    return make_dataclass(kind, own, bases=(_Table,), frozen=True)


def _filled(kind: type, tables: dict):
    """An instance of a dataclass with the values in nested tables."""
    types = {f.name: f.type for f in fields(kind)}
    return kind(**{k: _filled(types[k], value) if is_dataclass(types[k]) else value for k, value in tables.items()})


@dataclass(frozen=True)
class Settings:
    """Values by full name: ``settings["training.steps"]`` is the given value, or the default.

    Attributes:
        known: every setting that exists.
        given: the values from the TOML file and the flags.
    """

    known: Known
    given: Mapping[str, object]

    def __getitem__(self, name: str):
        return self.given[name] if name in self.given else self.known[name].default

    @cached_property
    def values(self):
        """All values as attributes, TorchTitan's job config: ``values.training.steps``."""
        return _filled(self.known.job_config, self.tables())

    def replaced(self, values: Mapping[str, object]) -> "Settings":
        """These settings with other ``values``, by full name."""
        return Settings(self.known, {**self.given, **values})

    def changed(self, name: str) -> bool:
        return self[name] != self.known[name].default

    def tables(self) -> dict:
        """The given values as nested tables, as in a TOML file."""
        root: dict = {}
        for name, value in self.given.items():
            *sections, last = name.split(".")
            table = root
            for section in sections:
                table = table.setdefault(section, {})
            table[last] = value
        return root

    def resolved(self) -> dict:
        """Every setting that differs from its default as nested tables for a TOML file, which has no None.

        Without the names of the config file and of the run's folder: a run of these settings must not write into it.
        """
        left_out = ("job.config_file", "job.dump_folder")
        values = {
            name: to_jsonable_python(self[name])  # paths, tuples and sets of a user's own section
            for name in self.known
            if self.changed(name) and self[name] is not None and name not in left_out
        }
        return Settings(self.known, values).tables()


Problems = Iterator[tuple[str, str]]
"""Names of settings, each with what is wrong with it and what is allowed"""


def raise_first(problems: Problems, settings: Settings) -> None:
    """Raise ConfigError for the first of the ``problems``, if there is one."""
    for name, problem in problems:
        raise ConfigError(f"{name} = {settings[name]!r} {problem}")


def flat(tables: Mapping, known: Mapping[str, Field], section: str = "") -> Iterator[tuple[str, object]]:
    """Full name and value of everything in nested tables; of an unknown table, its name and the table."""
    for key, value in tables.items():
        name = f"{section}.{key}".removeprefix(".")
        if name not in known and isinstance(value, dict) and any(other.startswith(f"{name}.") for other in known):
            yield from flat(value, known, name)
        else:
            yield name, value


def fields_of(job_config: type, section: str = "", resume: Resume | None = None) -> dict[str, Field]:
    """Every field of a job config and of its sections, by full name.

    ``resume`` holds for them, unless ``resume`` of a section's class or the type of a field says something else.
    """
    found, types = {}, get_type_hints(job_config, include_extras=True)
    file = getattr(sys.modules.get(job_config.__module__), "__file__", None)
    docs = (
        {name: doc for name, *_, doc in declarations(classes_in(file).get(job_config.__qualname__, ()))} if file else {}
    )
    for f in fields(job_config):
        name, kind = f"{section}.{f.name}".removeprefix("."), types[f.name]
        if is_dataclass(kind):
            own = getattr(kind, "resume", None)
            found |= fields_of(kind, name, own if isinstance(own, Resume) else resume)
        else:
            if f.default is MISSING and f.default_factory is MISSING:
                raise ConfigError(f"{job_config.__name__}.{f.name} in {file} has no default; give it one")
            default = f.default_factory() if f.default is MISSING else f.default
            metadata = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
            rule = next((part for part in metadata if isinstance(part, Resume)), resume)
            found[name] = Field(name, kind, default, rule, docs.get(f.name, ""))
    return found


@cache
def classes_in(file: str | Path) -> dict[str, list[ast.stmt]]:
    """The classes that a file of Python declares, with their statements; "A.B" is a class in another one."""

    def found(body: list[ast.stmt], outer: str) -> Iterator[tuple[str, list[ast.stmt]]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield outer + node.name, node.body
                yield from found(node.body, f"{outer}{node.name}.")

    return dict(found(ast.parse(Path(file).read_text(encoding="utf-8")).body, ""))


def declarations(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and the string below of every field of a dataclass, as they stand in its source."""
    for node, below in zip(body, [*body[1:], None]):
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=ast.expr() as value), _:
                doc = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
                yield name, ast.unparse(kind), ast.unparse(value), " ".join(doc.split())


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
