"""Types of settings: which values are allowed, and what a resumed run does with a change.

``pydantic`` checks the values.
"""

from enum import Enum
from typing import Annotated, Literal, TypeVar

import tomli
from annotated_types import Ge, Gt, Interval, MultipleOf
from pydantic import AfterValidator, AllowInfNan, BeforeValidator
from typing_extensions import TypedDict  # before Python 3.12, pydantic takes this one only
from tyro.conf import Fixed

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


Table = dict[str, str]
# Plain -m torchtitan.train makes no flag of it. With mxtrain's trainer, a flag has one word per entry.
Schedule = Fixed[list[Annotated[ScheduleEntry, BeforeValidator(_entry)]]]
Names = list[str] | None
"""A list of names; None where it is unset"""
