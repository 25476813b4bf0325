"""Presets as configs of TorchTitan 0.3's own command."""

import pytest
from torchtitan.config import ConfigManager

from mxtrain.config import presets
from mxtrain.settings.read import read_settings
from mxtrain.titan.v03 import preset


def test_flags_are_those_of_mxtrain_train(monkeypatch):
    flags = ["--training.steps=3", "--mxnorm.p=1", "--job.dump_folder=here", "--mxnorm.recipes", "layers.0", "bf16"]
    flags += ["--validation.no-enable", "--checkpoint.enable", "--checkpoint.create-seed-checkpoint"]
    config = ConfigManager().parse_args(["--module", "mxtrain.titan", "--config=llama3_debug", *flags])
    assert (config.dump_folder, config.training.steps, config.mxnorm.p) == ("here", 3, 1)
    trainer, found = config.build(), []
    assert not config.checkpoint.create_seed_checkpoint
    monkeypatch.setattr(preset, "work", lambda arguments, verbose, read: found.append(read(arguments)))
    trainer.train()
    wanted = read_settings([f"--job.config_file={presets()['llama3_debug']}", *flags])
    assert {name: found[0][name] for name in wanted.known if name != "job.config_file"} == {
        name: wanted[name] for name in wanted.known if name != "job.config_file"
    }


def test_every_preset_is_offered():
    with pytest.raises(ValueError, match="llama3_125m_nvfp4.*qwen3_moe_debug"):
        ConfigManager().parse_args(["--module=mxtrain.titan", "--config=llama3_debugs"])


def test_the_status_of_a_run_that_fails_is_its_processs(monkeypatch):
    monkeypatch.setattr(preset, "work", lambda *_: 2)
    trainer = preset.preset(presets()["qwen3_moe_debug"]).build()
    with pytest.raises(SystemExit) as exit:
        trainer.train()
    assert exit.value.code == 2
