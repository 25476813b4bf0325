"""mxtrain's presets by name, for TorchTitan 0.3: ``-m torchtitan.train --module mxtrain.titan --config llama3_debug``.

A preset is a function without arguments, as in every config registry of TorchTitan.
"""

import sys
from functools import partial
from pathlib import Path

from mxtrain.config import presets
from mxtrain.errors import ConfigError
from mxtrain.settings.fields import Settings
from mxtrain.settings.read import read_settings, settings_in
from mxtrain.settings.titan import settings_of
from mxtrain.titan.releases import RELEASE
from mxtrain.titan.train import work

if RELEASE == "v02":
    raise ConfigError(
        "--module mxtrain.titan is for TorchTitan 0.3; under 0.2.2, name a preset's file: mxtrain configs"
    )


def __getattr__(name: str):
    if name not in presets():
        raise AttributeError(f"module {__name__!r} has no preset {name!r}")
    return partial(preset, presets()[name])


def __dir__():
    return list(presets())


def preset(path: Path):
    """Return the settings of a TOML file, with what ``torchtitan.train`` asks of a config.

    The tables and names are those of the file, so its flags are those of ``mxtrain train``.
    """
    job_config = read_settings([f"--job.config_file={path}"]).values
    kind = type(job_config)

    class Config(kind):
        """Settings of a run."""

        dump_folder = property(lambda self: self.job.dump_folder)
        hf_assets_path = property(lambda self: self.model.hf_assets_path)

        def build(self) -> "_Run":
            return _Run(path, self)

    type(job_config.debug).enable_structured_logging = False
    return Config(**vars(job_config))


class _Run:
    """A trainer whose ``train`` is the whole run, from the checks of settings to the summary."""

    def __init__(self, path: Path, config):
        tables = settings_of(config).resolved()
        tables.setdefault("job", {})["dump_folder"] = config.job.dump_folder
        self._arguments = [f"--job.config_file={path}", *sys.argv[1:]]
        self._tables, self._kind = tables, type(config)
        self.checkpointer = self

    def save(self, **step) -> None:
        """Save a seed checkpoint, as ``train`` does."""
        self.train()

    def train(self) -> None:
        if status := work(self._arguments, False, self._read):
            sys.exit(status)

    def close(self) -> None:
        pass

    def _read(self, arguments: list[str]) -> Settings:
        return settings_in(self._tables, self._kind)
