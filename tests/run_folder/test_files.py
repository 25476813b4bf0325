from mxtrain.run_folder import files
from mxtrain.settings.read import known_fields


def test_defaults_are_titans():
    assert {
        "checkpoint.interval": files.CHECKPOINT_INTERVAL,
        "checkpoint.folder": files.CHECKPOINT_FOLDER,
        "optimizer.lr": files.LEARNING_RATE,
        "metrics.log_freq": files.LOG_FREQ,
        "training.steps": files.STEPS,
    }.items() <= {name: setting.default for name, setting in known_fields().items()}.items()
