"""The settings of one job."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from mxtrain.settings.fields import Field


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

    def section(self, name: str) -> SimpleNamespace:
        """The values of one table, as attributes."""
        own = [field for field in self.known if field.rpartition(".")[0] == name]
        return SimpleNamespace(**{field.rpartition(".")[2]: self[field] for field in own})

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
