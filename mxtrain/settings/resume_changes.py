"""Compares the settings of a resumed run with those it had so far: what changes, what is refused, what is reported."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pydantic_core import to_jsonable_python

from mxtrain.analysis.runs import SETTING_CHANGES
from mxtrain.data.config import DATASETS
from mxtrain.errors import ConfigError
from mxtrain.settings.fields import Field
from mxtrain.settings.resume_classes import ResumeClass, class_of, classes_of
from mxtrain.settings.values import Settings

BATCH = "training.global_batch_size"


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs between a run so far and its continuation."""

    name: str
    old: object
    new: object
    resume_class: ResumeClass


def settings_before(
    tables: Mapping, known: Mapping[str, Field], defaults: Mapping[str, object] = MappingProxyType({})
) -> Settings:
    """Return the settings of a run so far from the nested tables that it kept, which hold no defaults.

    A setting that this version does not know is left out. A value that this version refuses stays as it is.

    Args:
        defaults: the defaults that the run had, by full name. Of other settings it had those of this version.
    """
    had = {name: _as_checked(known[name], value) for name, value in defaults.items() if name in known}
    return Settings(known, had | dict(_known_values(tables, known)))


def kept_defaults(known: Mapping[str, Field]) -> dict[str, object]:
    """Return the defaults of all settings but those of a user's own module, by full name, as JSON values.

    Those that a resumed run may change freely are among them: the number of sequences per step follows from some.
    """
    return {name: to_jsonable_python(known[name].default) for name in known if classes_of(name)}


def other_defaults(known: Mapping[str, Field], defaults: Mapping[str, object]) -> dict:
    """Return the ``defaults`` that this version no longer has, by full name, as nested tables for a TOML file.

    Arguments as for ``settings_before``. What was unset by default, which a file cannot say, is left out.
    """
    had = settings_before({}, known, defaults)
    other = {name: value for name, value in had.given.items() if value not in (None, known[name].default)}
    return Settings(known, other).tables()


def changes(before: Settings, now: Settings, batch_before: int | None, batch_now: int) -> list[SettingChange]:
    """Return every setting that differs, in the order of the tables, except those whose change has no effect.

    Args:
        before: the settings of the run so far (see ``settings_before``).
        now: the settings of its continuation.
        batch_before, batch_now: sequences per step, over all processes and microbatches; None if unknown.
    """
    found = []
    for name in now.known:
        old, new = before[name], now[name]
        if name == BATCH:
            old, new = (old if batch_before is None else batch_before), batch_now
            if old == -1:
                continue
        if _differ(old, new):
            resume_class = class_of(name)
            if resume_class is ResumeClass.DATA:
                resume_class = _class_of_data(before, now)
            if resume_class is not ResumeClass.FREE:
                found.append(SettingChange(name, old, new, resume_class))
    return found


def require_allowed(found: list[SettingChange], may_change: list[str], checkpoint: object, beside: str = "") -> None:
    """Raise ConfigError for changes that would make another experiment, unless ``may_change`` names them.

    Args:
        may_change: full names of settings.
        checkpoint: names the checkpoint in the message.
        beside: what the sequences per step that the run had need here, too (``layout.beside_batch``).
    """
    refused = [c for c in found if c.resume_class is ResumeClass.REFUSED and c.name not in may_change]
    if not refused:
        return
    first, *others = refused
    names = [*may_change, *(change.name for change in refused)]
    also = f"; these differ, too: {', '.join(f'{c.name} ({c.old!r} -> {c.new!r})' for c in others)}" if others else ""
    trained, back = f"with {first.old!r}", f"set it to {first.old!r}"
    if first.old is None:
        trained, back = "without it", "leave it unset"
    if first.name == BATCH and beside:
        back += f" and {beside}"
    raise ConfigError(
        f"{first.name} = {first.new!r}{' in effect' if first.name == BATCH else ''}, but {checkpoint} was trained "
        f"{trained}; {back}, or allow the change with --checkpoint.may_change {','.join(names)}"
        f"{also}"
    )


def report(found: list[SettingChange], step: int) -> list[str]:
    """Return one line per change, for a run that goes on at ``step``."""
    return [f"{c.name}{SETTING_CHANGES}{c.old!r} to {c.new!r} at step {step}" for c in found]


def _class_of_data(before: Settings, now: Settings) -> ResumeClass:
    """The class of settings that say which text is read."""
    if "dataloader" in now["checkpoint.exclude_from_loading"]:
        return ResumeClass.APPLIED  # the user asks for the beginning of a text
    if _is_hashed(before) and _is_hashed(now):
        return ResumeClass.FREE  # the same text may lie elsewhere, and the data loader compares hashes
    return ResumeClass.REFUSED


def _is_hashed(settings: Settings) -> bool:
    """Whether the text is prepared before training, so that its hash is known, and not streamed."""
    return bool(settings["data.prepared"]) or settings["training.dataset"] in set(DATASETS) - {"hf"}


def _differ(old: object, new: object) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return list(old.items()) != list(new.items())  # of several names that match a layer, the last one counts
    return old != new


def _known_values(tables: Mapping, known: Mapping[str, Field], section: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tables.items():
        name = f"{section}.{key}".removeprefix(".")
        if name in known:
            yield name, _as_checked(known[name], value)
        elif isinstance(value, dict):
            yield from _known_values(value, known, name)


def _as_checked(field: Field, value: object) -> object:
    try:
        return field.checked(value)
    except ConfigError:
        return value
