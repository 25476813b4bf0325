"""Follows the precision schedule and the guard in a run: gives the layers the state of every step, and tells the user.

Every rank decides by the number of the step and, for the guard, by losses that all ranks have. So no rank waits.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from mxtrain.conversion.schedule import set_step
from mxtrain.recipes.schedule import ScheduleEntry, SpikeGuard
from mxtrain.reports import terminal
from mxtrain.settings.mxnorm_section import fallback_of, quantizing_among, schedule_of
from mxtrain.titan.graph_limit import allow_states


def schedule_in(job_config) -> list[ScheduleEntry]:
    """The entries of a run's schedule, in the order of the settings."""
    return schedule_of(job_config.mxnorm, job_config.training.steps) if _quantizes(job_config) else []


def guard_in(job_config) -> tuple[SpikeGuard, str] | None:
    """The guard of a run, and its change in words; None for a run without a guard."""
    section = job_config.mxnorm.guard
    fallback = fallback_of(job_config.mxnorm, section) if _quantizes(job_config) else None
    return None if fallback is None else (SpikeGuard(section.window, section.sigmas, section.steps), str(fallback))


def _quantizes(job_config) -> bool:
    return bool(quantizing_among(job_config.model.converters))


class RecipeSwitch:
    """Switches the layers of a run's model, or of this rank's stages, between steps.

    Args:
        log_event: (step, text) logs the beginning or end of a change.
        moved: entries whose steps are others than before the run resumed: as before, and now.

    Attributes:
        guard: to be given the loss of every step; None for a run without a guard.
    """

    def __init__(
        self,
        job_config,
        model_parts: list[torch.nn.Module],
        log_event: Callable[[int, str], None],
        moved: Sequence[tuple[ScheduleEntry, ScheduleEntry]] = (),
    ):
        self._entries = schedule_in(job_config)
        self.guard, self._fallback = guard_in(job_config) or (None, "")
        self._parts, self._log_event, self._moved = model_parts, log_event, moved
        self._switches = {step for entry in self._entries for step in (entry.first, entry.last + 1)}
        self._last_step: int | None = None
        self._fell_back = False
        if self._entries or self.guard:
            allow_states(model_parts, (len(self._switches) + 1) * (2 if self.guard else 1))

    def return_to(self, step: int) -> None:
        """Give the layers of a run that resumes their states of its last step, for a validation, and tell nobody."""
        self._set_step(step, self._falls_back(step))

    def begin_step(self, step: int) -> None:
        """Give the layers their states of ``step``, before its first forward."""
        falls_back = self._falls_back(step)
        is_first = self._last_step is None
        if is_first or step in self._switches or falls_back != self._fell_back:
            self._set_step(step, falls_back)
            for line in self._in_effect(step) if is_first else ():
                terminal.note(line)
            for text, details in self._events(step):
                terminal.note(f"step {step}: {text}{details}")
                self._log_event(step, text)
        self._last_step, self._fell_back = step, falls_back

    def _falls_back(self, step: int) -> bool:
        return self.guard is not None and self.guard.falls_back(step)

    def _set_step(self, step: int, falls_back: bool) -> None:
        for part in self._parts:
            set_step(part, step, falls_back)

    def _events(self, step: int) -> Iterator[tuple[str, str]]:
        """Yield what begins or ends with a step: a few words, and details."""
        for before, now in self._moved if self._last_step is None else ():
            if _was_in_effect(before, step) and not now.first <= step <= now.last + 1:
                yield f"end of {_words(before)}", f" ({before.name})"
            if not _was_in_effect(before, step) and now.first < step <= now.last:
                yield _words(now), f", to step {now.last} ({now.name})"
        for entry in self._entries:
            if step == entry.last + 1:
                yield f"end of {_words(entry)}", f" ({entry.name})"
        for entry in self._entries:
            if step == entry.first:
                yield _words(entry), f", to step {entry.last} ({entry.name})"
        if self.guard is None:
            return
        if step == self.guard.last + 1 and self.guard.last:
            yield f"end of guard: {self._fallback}", ""
        if step == self.guard.first:
            yield f"guard: {self._fallback}", f", to step {self.guard.last}: {self.guard.reason}"

    def _in_effect(self, step: int) -> Iterator[str]:
        """Yield a line for every change that began before ``step``, with which a run resumes."""
        # An entry that moved and so begins with this step is an event.
        begun = [now for before, now in self._moved if not _was_in_effect(before, step)]
        for entry in self._entries:
            if entry.first < step <= entry.last and entry not in begun:
                yield f"in effect from step {entry.first} to {entry.last}: {_words(entry)} ({entry.name})"
        if self.guard is not None and self.guard.first < step <= self.guard.last:
            yield f"in effect from step {self.guard.first} to {self.guard.last}: guard: {self._fallback}"


def _was_in_effect(before: ScheduleEntry, step: int) -> bool:
    """Whether an entry, as it was before the run resumed with ``step``, was in effect in the step before."""
    return before.first < step <= before.last + 1


def _words(entry: ScheduleEntry) -> str:
    return str(entry.change) if entry.modules is None else f"{entry.change} in {', '.join(entry.modules)}"
