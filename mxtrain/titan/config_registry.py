"""mxtrain's presets by name, for TorchTitan 0.3: ``-m torchtitan.train --module mxtrain.titan --config llama3_debug``.

A preset is a function without arguments, as in every config registry of TorchTitan.
"""

from functools import partial

from mxtrain.config import presets
from mxtrain.errors import ConfigError
from mxtrain.titan.releases import RELEASE

if RELEASE == "v02":
    raise ConfigError(
        "--module mxtrain.titan is for TorchTitan 0.3; under 0.2.2, name a preset's file: mxtrain configs"
    )


def __getattr__(name: str):
    if name not in presets():
        raise AttributeError(f"module {__name__!r} has no preset {name!r}")
    from mxtrain.titan.v03.preset import preset

    return partial(preset, presets()[name])


def __dir__():
    return list(presets())
