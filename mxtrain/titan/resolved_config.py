"""The settings of a run, written into its folder: with them alone the same run can be started again."""

from pathlib import Path

from mxtrain.config import dump_config, load_config
from mxtrain.errors import ConfigError
from mxtrain.reports import terminal
from mxtrain.run_folder.files import CONFIG_FILE
from mxtrain.run_folder.start import require_folder
from mxtrain.titan.parse import resolved_settings


def write_resolved_config(job_config) -> None:
    """Write the settings of a run to ``config.toml`` in its folder; a warning if the file cannot be written."""
    path = Path(job_config.job.dump_folder) / CONFIG_FILE
    settings = resolved_settings(job_config)
    if (name := _own_folder(path)) is not None:
        settings.setdefault("job", {})["dump_folder"] = name  # the command that started with this file resumes
    with terminal.go_on_without(path):
        dump_config(settings, path)


def _own_folder(config: Path) -> str | None:
    """Return the folder that a config names, if it lies in this folder: not in a copy of it, and it was not moved."""
    try:
        name = load_config(config)["job"]["dump_folder"]
        return name if require_folder(name).samefile(config.parent) else None
    except (ConfigError, LookupError, TypeError, OSError):  # no such file, no such setting, or a folder that is gone
        return None
