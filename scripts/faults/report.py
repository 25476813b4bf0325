"""What came of the kills of a drill: in a table with one line per moment, and in JSON."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Kill:
    """One kill and its consequences."""

    moment: str
    step: int = 0
    """Last step in the run's metrics"""
    kept: int = 0
    """Step of the newest complete checkpoint after the kill, or 0"""
    differing: list[int] = field(default_factory=list)
    """Steps up to the kill whose loss or gradient norm was not that of the reference"""
    damaged: list[str] = field(default_factory=list)
    """Checkpoints that look complete and cannot be loaded"""
    vanished: int = 0
    """Step of a complete checkpoint that the kill lost, or 0"""
    failure: str = ""
    """How the next command failed to resume from ``kept``, or how the export failed, or nothing"""

    @property
    def lost(self) -> int:
        return max(0, self.step - self.kept)

    @property
    def is_harmless(self) -> bool:
        return not (self.differing or self.damaged or self.vanished or self.failure)

    def __str__(self) -> str:
        harm = "" if self.is_harmless else f"; HARM: {json.dumps(asdict(self))}"
        return f"{self.moment}: at step {self.step}, newest checkpoint {self.kept or 'none'}{harm}"


def table(kills: Sequence[Kill], finished: Sequence[list[int]]) -> str:
    """Return a table of the kills by moment, and a line about the runs that reached their end.

    Args:
        kills: the kills so far.
        finished: for every run that reached its end, the steps that differ from the reference.
    """
    header = ("moment", "kills", "steps lost, mean", "most", "failures", "damaged", "vanished", "differing steps")
    names = sorted({kill.moment for kill in kills})
    rows = [_row(name, [kill for kill in kills if kill.moment == name]) for name in names]
    rows.append(_row("all", kills))
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    same = sum(not steps for steps in finished)
    lines.append(f"{len(finished)} runs reached their end; {same} have the losses and gradient norms of the reference")
    return "\n".join(lines)


def _row(name: str, kills: Sequence[Kill]) -> tuple[str, ...]:
    lost = [kill.lost for kill in kills]
    numbers = (
        sum(bool(kill.failure) for kill in kills),
        sum(len(kill.damaged) for kill in kills),
        sum(bool(kill.vanished) for kill in kills),
        sum(len(kill.differing) for kill in kills),
    )
    mean = f"{sum(lost) / len(lost):.1f}" if lost else "-"
    return (name, str(len(kills)), mean, str(max(lost, default=0)), *map(str, numbers))


def write_json(options: argparse.Namespace, kills: Sequence[Kill], finished: Sequence[list[int]]) -> None:
    """Write the options, all kills and the runs that reached their end to ``options.output``, if that is set."""
    if options.output is None:
        return
    chosen = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    rows = [{**asdict(kill), "lost": kill.lost} for kill in kills]
    options.output.write_text(json.dumps({"options": chosen, "kills": rows, "finished": finished}, indent=1) + "\n")
