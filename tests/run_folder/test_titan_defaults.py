import dataclasses

from mxtrain.run_folder import titan_defaults as ours
from mxtrain.run_folder.start import CheckpointSettings
from mxtrain.settings.known import known_fields


def test_defaults_are_titans():
    known = known_fields()
    assert {
        "checkpoint.interval": ours.CHECKPOINT_INTERVAL,
        "checkpoint.folder": ours.CHECKPOINT_FOLDER,
        "optimizer.lr": ours.LEARNING_RATE,
        "metrics.log_freq": ours.LOG_FREQ,
        "training.steps": ours.STEPS,
    }.items() <= {name: setting.default for name, setting in known.items()}.items()
    for name, value in dataclasses.asdict(CheckpointSettings()).items():
        default = known[f"checkpoint.{name}"].default
        assert (list(value) if isinstance(value, tuple) else value) == default, name
