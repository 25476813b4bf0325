"""What all converters have in common: settings of their own, and a plan that follows from a survey."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from mxtrain.conversion.plan import Plan
from mxtrain.conversion.selection import selected
from mxtrain.conversion.survey import Survey
from mxtrain.errors import ConfigError

NOT_ONE_DIMENSION = "normalizes more than one dimension"


@dataclass(kw_only=True)
class Converter(ABC):
    """Checks its settings when it is built, and plans from a ``Survey``. It holds no model.

    Attributes:
        filter_fqns: patterns of modules to keep (see ``selection.matches``); each must match a module. None names none.

    Raises:
        ConfigError: for a wrong setting.
    """

    name: ClassVar[str]
    watches_norms: ClassVar[bool] = False
    """Whether ``plan`` needs to know what uses the outputs of norms"""
    way_out: ClassVar[str] = ""
    """What to try with a model in which this converter finds nothing, as a line of the error"""
    # Whether mxtrain's passes over compiled graphs run from now on; None changes nothing. Only converters whose layers
    # have casts make this a setting, so it has no annotation here.
    graph_passes = None

    filter_fqns: Iterable[str] | None = None

    def __post_init__(self):
        if not isinstance(self.filter_fqns, Iterable | None):
            raise ConfigError(f"filter_fqns = {self.filter_fqns!r} is not a list of names of modules")
        if isinstance(self.filter_fqns, str):
            raise ConfigError(f"filter_fqns = {self.filter_fqns!r} is not a list: write [{self.filter_fqns!r}]")

    @abstractmethod
    def plan(self, survey: Survey) -> Plan:
        """What every module that concerns this converter becomes, or why it stays.

        Raises:
            ConfigError: for a pattern that matches nothing, a setting that the model rules out, or a model with
                nothing to convert.
        """

    def _filtered(self, survey: Survey) -> dict[str, str]:
        """The modules that the user named, and those that no converter can swap -> the reason to keep them."""
        named = {
            fqn: "named in filter_fqns"
            for pattern in self.filter_fqns or ()
            for fqn in selected(survey.names, pattern, "filter_fqns")
        }
        return {**survey.unswappable, **named}

    def _nothing_to_convert(self, survey: Survey, skipped: Mapping[str, str]) -> ConfigError:
        # A large model has hundreds of modules that stay for the same reason.
        by_reason: dict[str, list[str]] = {}
        for fqn, reason in skipped.items():
            by_reason.setdefault(reason, []).append(fqn)
        left = "".join(
            f"\n  {first}{f' and {len(others)} more' if others else ''}: {reason}"
            for reason, (first, *others) in by_reason.items()
        )
        way_out = f"\n{self.way_out}" if self.way_out else ""
        return ConfigError(f"converter = {self.name!r} finds nothing to convert in this {survey.kind}{left}{way_out}")


def why_lookalikes_stay(survey: Survey, lookalikes: Mapping[str, str]) -> dict[str, str]:
    """``lookalikes``: those of the survey that a converter of such norms would take."""
    return {fqn: survey.unswappable.get(fqn, reason) for fqn, reason in lookalikes.items()}
