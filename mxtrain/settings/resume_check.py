"""Whether a run may resume with its present settings, and what changes since the checkpoint from which it goes on."""

from mxtrain.analysis.runs import PROCESSES, SETTING_CHANGES
from mxtrain.checkpoints.start import Start
from mxtrain.recipes.schedule import ScheduleEntry
from mxtrain.settings.layout import beside_batch, global_batch_size
from mxtrain.settings.mxnorm_section import SCHEDULE, schedule_of
from mxtrain.settings.relations import quantizing
from mxtrain.settings.resume_changes import changes, report, require_allowed, settings_before
from mxtrain.settings.values import Settings


def check_resume(start: Start, settings: Settings, processes: int) -> list[str]:
    """Compare a run's settings with those of the checkpoint that it resumes from.

    Args:
        start: where the run starts. At step 0 it does not resume, and nothing is compared.
        settings: of the run's continuation.
        processes: their number in its continuation.

    Returns:
        One line for the user for every setting, and number of processes, that changes, and schedule entry that moves.

    Raises:
        ConfigError: for a change that ``checkpoint.may_change`` would have to name.
    """
    if start.step == 0:
        return []
    manifest = start.manifest
    before = settings_before(manifest.settings, settings.known, manifest.defaults)
    batch = global_batch_size(before, manifest.processes)
    found = changes(before, settings, batch, global_batch_size(settings, processes))
    may_change = settings["checkpoint.may_change"] or []
    require_allowed(found, may_change, start.checkpoint, beside_batch(settings, processes, batch))
    moves = [
        f"{new.name} moves from steps {old.first} to {old.last} to steps {new.first} to {new.last}"
        for old, new in _moved(before, settings)
    ]
    if processes != manifest.processes:
        moves.append(f"{PROCESSES}{SETTING_CHANGES}{manifest.processes} to {processes} at step {start.step + 1}")
    return [*report(found, start.step + 1), *moves]


def moved_entries(start: Start, settings: Settings) -> list[tuple[ScheduleEntry, ScheduleEntry]]:
    """Return the entries of an unchanged schedule whose steps follow from the number of steps: as before, and now.

    Arguments as for ``check_resume``.
    """
    if start.step == 0:
        return []
    manifest = start.manifest
    return _moved(settings_before(manifest.settings, settings.known, manifest.defaults), settings)


def _moved(before: Settings, now: Settings) -> list[tuple[ScheduleEntry, ScheduleEntry]]:
    if not quantizing(now) or before[SCHEDULE] != now[SCHEDULE]:
        return []
    section = now.section("mxnorm")
    pairs = zip(*(schedule_of(section, settings["training.steps"]) for settings in (before, now)), strict=True)
    return [(old, new) for old, new in pairs if old != new]
