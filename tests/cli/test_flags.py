import pytest

from mxtrain.cli.flags import checkpoint_settings, flag_value
from mxtrain.errors import ConfigError
from mxtrain.run_folder.start import CheckpointSettings


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--job.dump_folder", "x"], "x"),
        (["--a", "b", "--job.dump-folder=x=y"], "x=y"),
        (["--job.dump_folder=x", "--job.dump_folder", "y"], "y"),  # as TorchTitan's parser does
        (["--job.dump_folder"], ""),
        (["--job.dump_folders", "x"], None),
        (["job.dump_folder", "x"], None),
        ([], None),
    ],
)
def test_flag_value(flags, expected):
    assert flag_value(flags, "job.dump_folder") == expected


@pytest.mark.parametrize(
    "table, flags, expected",
    [
        ({}, [], {}),
        ({"enable": True, "interval": 3}, [], {"enable": True}),
        ({"enable": True}, ["--checkpoint.no-enable"], {"enable": False}),
        ({}, ["--checkpoint.no_enable", "--checkpoint.enable"], {"enable": True}),
        ({"load_step": 4}, ["--checkpoint.load-step=-1"], {"load_step": -1}),
        ({}, ["--checkpoint.load_only", "--checkpoint.folder", "c"], {"load_only": True, "folder": "c"}),
        ({"initial_load_path": "a"}, ["--checkpoint.initial_load_path", "None"], {"initial_load_path": None}),
        ({}, ["--checkpoint.exclude_from_loading=a,b"], {"exclude_from_loading": ["a", "b"]}),
    ],
)
def test_checkpoint_settings(table, flags, expected):
    assert checkpoint_settings({"checkpoint": table}, flags) == CheckpointSettings(**expected)


@pytest.mark.parametrize(
    "table, flags, message",
    [
        ({"folder": 3}, [], "checkpoint.folder = 3 is not of the type str"),
        ({"enable": "yes"}, [], "checkpoint.enable = 'yes' is not of the type bool"),
        ({}, ["--checkpoint.load_step=two"], "checkpoint.load_step = 'two' is not of the type int"),
        ({"initial_load_path": 1}, [], "checkpoint.initial_load_path = 1 is not of the type str | None"),
    ],
)
def test_values_of_a_wrong_type(table, flags, message):
    with pytest.raises(ConfigError) as error:
        checkpoint_settings({"checkpoint": table}, flags)
    assert str(error.value) == message


def test_the_settings_have_torchtitans_names_and_defaults():
    from torchtitan.config import JobConfig

    assert CheckpointSettings.of(JobConfig().checkpoint) == CheckpointSettings(exclude_from_loading=[])
