"""Jobs with other settings."""

from dataclasses import replace


def with_setting(job, name: str, value):
    """Return the job with another value for a setting, such as "training.steps"."""
    section, _, last = name.partition(".")
    return replace(job, **{section: replace(getattr(job, section), **{last: value})})
