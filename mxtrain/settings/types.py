"""Types of settings: which values are allowed, and what a resumed run does with a change.

``pydantic`` checks the values; tyro shows them in the ``--help`` of plain ``-m torchtitan.train``.
"""

import json
from enum import Enum
from itertools import chain, zip_longest
from typing import Annotated, Literal, TypeVar

import tomli
from annotated_types import Ge, Gt, Interval, MultipleOf
from pydantic import AfterValidator, AllowInfNan, BeforeValidator
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes this one only
from tyro.constructors import PrimitiveConstructorSpec

from mxtrain.data.config import LARGEST_VOCABULARY
from mxtrain.files import local_path, parse
from mxtrain.formats.schedule import RMSNORM


class Resume(Enum):
    """What a resumed run may do with a setting."""

    FREE = "free"
    """
    Changes at most the order of sums: logging, folders, layout, compilation. Or a hash is compared in its place, as for
    a tokenizer
    """
    APPLIED = "applied"
    """Changes the curve from the next step on, as users expect; the change is applied and reported"""
    DATA = "text"
    """Selects the text: free if the text has a hash, which is compared; refused if the text is streamed"""
    REFUSED = "refused"
    """Makes the rest of the curve another experiment; refused unless checkpoint.may_change names it"""


T = TypeVar("T")
Free = Annotated[T, Resume.FREE]
Refused = Annotated[T, Resume.REFUSED]

Positive = Annotated[int, Ge(1)]
NotNegative = Annotated[int, Ge(0)]
VocabularySize = Annotated[int, Interval(ge=0, le=LARGEST_VOCABULARY)]
Groups = Annotated[int, Ge(32), MultipleOf(32)]
"""Tokens in groups of 32"""
StepOrMinusOne = Annotated[int, Ge(-1)]
Seed = Annotated[int, Interval(ge=0, lt=2**64)]
"""What PyTorch takes"""

PositiveNumber = Annotated[float, Gt(0)]
Amount = Annotated[float, Ge(0), AllowInfNan(False)]
"""A finite number that is not negative"""

FinitePositive = Annotated[float, Gt(0), AllowInfNan(False)]

Share = Annotated[float, Interval(ge=0, le=1)]
ShareBelowOne = Annotated[float, Interval(ge=0, lt=1)]


def _positive_or_minus_one(number: int) -> int:
    if number != -1 and number < 1:
        raise ValueError("should be -1 or at least 1")
    return number


def _op_or_positive(text: str) -> str:
    if text != "op" and not (text.isdecimal() and int(text) >= 1):
        raise ValueError("should be 'op' or a number of layers, '1' or more")
    return text


PositiveOrMinusOne = Annotated[int, AfterValidator(_positive_or_minus_one)]
OpOrPositive = Annotated[str, AfterValidator(_op_or_positive)]
LocalPath = Annotated[str, AfterValidator(local_path)]


class ScheduleEntry(TypedDict, total=False):
    """An entry of a schedule: where it begins and ends, which modules it selects, and what changes in them."""

    from_step: int
    from_share: float
    until_step: int
    until_share: float
    modules: list[str]
    recipe: str
    norm: Literal[RMSNORM]


def _entry(value):
    """An entry of an array of tables; from the command line, an inline table of TOML."""
    if isinstance(value, str):
        try:
            value = parse(f"entry = {value}", tomli.loads)["entry"]
        except ValueError as error:
            example = '{from_share = 0.9, recipe = "fprop=bf16"}'
            raise ValueError(f"is not an inline table of TOML, such as {example} ({error})") from None
    keys = ScheduleEntry.__annotations__
    if unknown := [key for key in value if key not in keys] if isinstance(value, dict) else []:
        raise ValueError(f"has the key {unknown[0]}, which does not exist; allowed are {', '.join(keys)}")
    return value


def _of_words(kind, nargs: int | str, metavar: str, read, write):
    """A type with the words of its flag for tyro, which reads them in plain -m torchtitan.train."""
    spec = PrimitiveConstructorSpec(
        nargs=nargs,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(word) for word in write(value)],
    )
    return Annotated[kind, spec]


# The flag replaces the whole table of the TOML; tyro would make one flag per key of that table.
Table = _of_words(
    *(dict[str, str], "*", "NAME RECIPE ..."),
    read=lambda words: dict(zip_longest(words[::2], words[1::2], fillvalue="")),
    write=lambda table: chain(*table.items()),
)
# Entries in the TOML as an array of tables. A flag has one word per entry.
Schedule = _of_words(
    *(list[Annotated[ScheduleEntry, BeforeValidator(_entry)]], "*", "{...} ..."),
    read=lambda words: [_entry(word) for word in words],
    write=lambda entries: map(json.dumps, entries),
)
# TorchTitan's rule for flags with commas serves list[str] alone, and reads an empty flag as one empty name.
Names = _of_words(
    *(list[str] | None, 1, "A,B,C,..."),
    read=lambda words: None if words == ["None"] else [name for name in words[0].split(",") if name],
    write=lambda names: [names if names is None else ",".join(names)],
)
"""A list of names; None where it is unset"""
