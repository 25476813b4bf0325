"""Where a run starts, and what changes then. The launcher looks, or under ``torchrun`` the first rank of each node."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from mxtrain.analysis.runs import SETTING_CHANGES
from mxtrain.checkpoints.start import Start, find_start
from mxtrain.settings.resume_check import check_resume
from mxtrain.settings.values import Settings


def checked_start(
    folder: Path, settings: Settings, processes: int, damaged: Mapping[str, str] = MappingProxyType({})
) -> Start:
    """Return where a run with these settings starts in ``folder``, and what changes since then.

    Arguments as for ``find_start``. Raises ConfigError as ``find_start`` and ``check_resume``.
    """
    checkpoint = settings.section("checkpoint")
    start = find_start(folder, checkpoint, processes, damaged)
    lines = check_resume(start, settings, processes)
    recorded = [line for line in lines if SETTING_CHANGES in line]
    if start.step and checkpoint.exclude_from_loading:
        parts = " and ".join(checkpoint.exclude_from_loading)
        recorded.append(
            f"checkpoint.exclude_from_loading: step {start.step + 1} begins without the checkpoint's {parts}"
        )
    notes = (*start.notes, *(line for line in lines if line not in recorded))
    return replace(start, notes=notes, changes=tuple(recorded))
