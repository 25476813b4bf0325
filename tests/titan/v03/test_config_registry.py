"""Presets as configs of TorchTitan 0.3's own command."""

import json
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from torchtitan.config import ConfigManager
from torchtitan.train import main

from mxtrain.config import presets
from mxtrain.settings.read import read_settings
from mxtrain.titan import config_registry


def test_flags_are_those_of_mxtrain_train(monkeypatch):
    flags = ["--training.steps=3", "--mxnorm.p=1", "--job.dump_folder=here", "--mxnorm.recipes", "layers.0", "bf16"]
    flags += ["--validation.no-enable", "--checkpoint.enable", "--checkpoint.create-seed-checkpoint"]
    config = ConfigManager().parse_args(["--module", "mxtrain.titan", "--config=llama3_debug", *flags])
    assert (config.dump_folder, config.training.steps, config.mxnorm.p) == ("here", 3, 1)
    trainer, found = config.build(), []
    monkeypatch.setattr(config_registry, "work", lambda arguments, verbose, read: found.append(read(arguments)))
    trainer.checkpointer.save(curr_step=0, last_step=True)
    wanted = read_settings([f"--job.config_file={presets()['llama3_debug']}", *flags])
    assert {name: found[0][name] for name in wanted.known if name != "job.config_file"} == {
        name: wanted[name] for name in wanted.known if name != "job.config_file"
    }


def test_every_preset_is_offered():
    with pytest.raises(ValueError, match="llama3_125m_nvfp4.*qwen3_moe_debug"):
        ConfigManager().parse_args(["--module=mxtrain.titan", "--config=llama3_debugs"])


def test_the_status_of_a_run_that_fails_is_its_processs(monkeypatch):
    monkeypatch.setattr(config_registry, "work", lambda *_: 2)
    trainer = config_registry.preset(presets()["qwen3_moe_debug"]).build()
    with pytest.raises(SystemExit) as exit:
        trainer.train()
    assert exit.value.code == 2


@patch.dict(
    os.environ, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
)
def test_the_same_command_resumes_a_run(tmp_path, monkeypatch):
    text = ["--training.dataset=files", f"--training.dataset_path={Path(__file__).parents[1]}/*.py"]
    text += ["--data.vocab_size=300", f"--data.cache_dir={tmp_path / 'cache'}", "--validation.no-enable"]
    small = ["--model_args.n_layers=1", "--training.seq_len=64", "--training.local_batch_size=1", "--training.steps=2"]
    save = ["--checkpoint.enable", "--checkpoint.interval=1", "--metrics.log_freq=1", "--metrics.no-enable_wandb"]
    run = ["--module=mxtrain.titan", "--config=llama3_debug", f"--job.dump_folder={tmp_path / 'run'}"]
    monkeypatch.setattr("sys.argv", ["train.py", *run, *text, *small, *save, "--mxnorm.recipe=nvfp4"])
    rows = []
    for _ in range(2):
        main()
        rows.append((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-2")  # as if the run had been killed before
    (first, whole), (kept, resumed) = rows
    assert kept == first, "the metrics file goes on"
    whole, resumed = json.loads(whole), json.loads(resumed)
    assert [resumed[key] for key in ("loss", "grad_norm")] == [whole[key] for key in ("loss", "grad_norm")]
