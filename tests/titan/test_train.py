"""The trainer from end to end (see training_runs), and mistakes in settings."""

import json
import math
import re
import statistics

import pytest
import tomli
import torch

from mxtrain import ConfigError
from mxtrain.analysis import load_run
from mxtrain.checkpoints.checkpointer import SaveError
from mxtrain.checkpoints.folder import Checkpoints
from mxtrain.settings.read import read_settings
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.releases import RELEASE
from mxtrain.titan.train import train
from tests.support.training_runs import CONFIG, MIXED_RECIPE, MIXED_RECIPES, Outcome

LEARNERS = ["mxnorm", "mixed", "bf16", "nvfp4", "deepseek_v3", "qwen3"]
SHORT = ["exact", "post_round", "mx_linear", "mxfp4", "e5m2", "p1", *(["llama4"] if RELEASE == "v02" else [])]


def test_every_variant_learns_and_each_computes_something_else(one):
    for name in LEARNERS:
        losses = one[name].losses
        assert [row["step"] for row in one[name].rows] == list(range(1, 13)), name
        assert statistics.mean(losses[-3:]) < losses[0] - 0.7, name
        assert all(row["grad_norm"] > 0 for row in one[name].rows), name
    assert len({tuple(one[name].losses[:3]) for name in LEARNERS + SHORT}) == len(LEARNERS + SHORT)
    assert one["p1"].losses[0] == pytest.approx(one["mxnorm"].losses[0], rel=0.01)
    validated = load_run(one["deepseek_v3"].folder).validation
    assert [row["step"] for row in validated] == [1, 10, 12]
    assert validated[2]["validation_loss"] < validated[0]["validation_loss"] - 0.5


def test_variants_start_from_equal_weights_and_read_the_same_text(one):
    # Both compute in fp32 and differ in the order of sums only. Other weights or text would differ in the second digit.
    assert one["fused"].losses[0] == pytest.approx(one["bf16"].losses[0], rel=2e-6)


def test_a_seed_fixes_the_curve(one):
    assert one["mxnorm again"].losses == one["mxnorm"].losses[:3]


def test_validation_follows_the_training_text_without_changing_it(one):
    run = one["validation follows"]
    assert run.losses == one["mxnorm"].losses[:1]  # the same prepared text, whose validation part is read
    assert [row["step"] for row in load_run(run.folder).validation] == [1]
    kept = [json.loads((one[name].folder / "data.json").read_text()) for name in ("validation follows", "mxnorm")]
    assert kept[0]["prepared"] == kept[1]["prepared"]


def test_a_run_that_was_killed_resumes_as_if_nothing_had_happened(one):
    names = ("killed, resumed", "mxnorm")
    resumed, whole = ([(row["step"], row["loss"], row["grad_norm"]) for row in one[name].rows] for name in names)
    assert resumed == whole and len(resumed) == 12
    lines = one["killed, resumed"].output[0].splitlines()
    assert re.fullmatch(r"resuming after step \d+, from .*/killed/run/checkpoint/step-\d+", lines[0])
    # TorchTitan alone would have removed step 10 and 11 for the sake of the two parts.
    assert re.fullmatch(r"checkpoints after step \d+ go to .*/checkpoint/set_aside: step-100, step-200", lines[3])
    saved = Checkpoints(one["killed, resumed"].folder / "checkpoint")
    assert all(manifest.defaults["training.seq_len"] == 2048 for manifest in saved.whole.values()), "not this run's 64"
    assert list(saved.whole) == [11, 12] and not saved.problems
    assert saved.whole[12].settings["optimizer"] == {"lr": 1e-2}


def test_a_run_does_not_replace_another(one):
    """The worker refuses, as under torchrun; tests/cli/test_bad_run_folders.py has what the launcher refuses."""
    refused, owner = one["replaced"], one["mxnorm"]
    assert refused.statuses == [2] and len(owner.rows) == 12
    (line,) = refused.output[0].splitlines()
    assert line.startswith("mxtrain: error: checkpoint.enable = False, but ") and "holds step-12;" in line
    assert (owner.folder / "conversion.txt").stat().st_size > 0


def test_a_loss_that_is_not_finite_stops_training(one, several):
    stopped = one["nan"]
    assert stopped.statuses == [1] and "Traceback" not in stopped.output[0]
    assert stopped.output[0].splitlines()[-1] == (
        "mxtrain: error: step 2: the loss is nan on rank 0; training stops. The last checkpoint, with finite weights, "
        f"is {stopped.folder}/checkpoint/step-1. Try a lower optimizer.lr, more lr_scheduler.warmup_steps or a recipe "
        'with more bits; metrics.on_nonfinite_loss = "continue" only warns'
    )
    both = several["nan"]
    for run in (stopped, both):  # logged, although no step but the first one was to be
        first, last = load_run(run.folder).training
        assert (last["step"], last["tokens_seen"]) == (2, 2 * first["tokens_seen"]) and math.isnan(last["loss"])
    assert both.statuses == [1, 1]
    for output in both.output:
        (error,) = [line for line in output.splitlines() if line.startswith("mxtrain: error")]
        assert "step 2: the loss is nan on rank 0, nan on rank 1; training stops. There is no checkpoint." in error


def test_training_may_go_on_after_a_loss_that_is_not_finite_but_keeps_the_last_finite_checkpoint(one):
    run = one["nan, continued"]
    assert run.statuses == [0]
    warnings = [line for line in run.output[0].splitlines() if line.startswith("warning: step")]
    unsaved = "the weights after this step hold nan on rank 0; no checkpoint is saved"
    assert warnings == [
        'warning: step 2: the loss is nan on rank 0; training goes on (metrics.on_nonfinite_loss = "continue")',
        *[f"warning: step {step}: {unsaved}" for step in (2, 3, 4)],
    ]
    assert Checkpoints(run.folder / "checkpoint").found == ["step-1"]


def test_a_run_records_its_settings(one):
    resolved = tomli.loads((one["mixed"].folder / "config.toml").read_text())
    assert resolved["mxnorm"] == {"recipe": MIXED_RECIPE, "recipes": MIXED_RECIPES}
    assert list(resolved["mxnorm"]["recipes"]) == list(MIXED_RECIPES)  # the last match wins
    assert resolved["training"] == {**CONFIG["training"], "dataset_path": resolved["training"]["dataset_path"]}
    assert resolved["model"] == {"flavor": "tiny", "converters": ["mxnorm"]}  # the name is the default
    assert resolved["job"] == {"custom_config_module": "mxtrain.titan.job_config"}  # no config_file, no dump_folder
    facts = json.loads((one["mixed"].folder / "run.json").read_text())
    assert facts["recipe"] == MIXED_RECIPE and facts["recipes"] == MIXED_RECIPES
    assert tomli.loads((one["p1"].folder / "config.toml").read_text())["mxnorm"] == {"p": 1}


def require_one_line(outcome: Outcome, message: str) -> None:
    assert set(outcome.statuses) == {2}, outcome.output
    errors = [line for line in outcome.output[0].splitlines() if line.startswith("mxtrain: error: ")]
    assert len(errors) == 1 and message in errors[0], outcome.output[0]
    assert "Traceback" not in outcome.output[0]
    assert not (outcome.folder / "metrics.jsonl").exists()


def test_a_mistake_that_two_workers_find_prints_one_line(several):
    require_one_line(several["pipeline"], "pipeline_parallel_schedule = 'ZBVZeroBubble' should be '1F1B', 'GPipe'")


def test_a_mode_that_this_machine_lacks_is_refused(monkeypatch):
    # As on a machine without a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("torchtitan.tools.utils.device_type", "cpu")
    with pytest.raises(ConfigError, match="^mxnorm.mode = 'native' cannot run here"):
        parse_job_config(["--model.converters=mxnorm", "--mxnorm.mode=native"])


def test_a_config_that_extends_another(tmp_path):
    (tmp_path / "base.toml").write_text('[mxnorm]\np = 2\nestimator = "exact"\n')
    (tmp_path / "variant.toml").write_text('extends = "base.toml"\n[mxnorm]\np = 1\n')
    job_config = parse_job_config(["--job.config_file", str(tmp_path / "variant.toml"), "--mxnorm.eps", "1e-6"])
    assert (job_config.mxnorm.p, job_config.mxnorm.estimator, job_config.mxnorm.eps) == (1, "exact", 1e-6)


def test_values_that_toml_lacks_are_written_as_lists_and_strings(tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text(
        "from dataclasses import dataclass, field\nfrom pathlib import Path\n\n"
        "@dataclass\nclass Own:\n    path: Path = Path('.')\n    pair: tuple[int, int] = (1, 2)\n\n"
        "@dataclass\nclass JobConfig:\n    own: Own = field(default_factory=Own)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ["--job.custom_config_module=my_own", "--own.path=a/b", "--own.pair", "3", "4"]
    assert read_settings(own).resolved()["own"] == {"path": "a/b", "pair": [3, 4]}


def test_only_settings_that_differ_from_the_defaults_are_written():
    flags = ["--training.dataloader.num_workers=2", "--mxnorm.filter_fqns=output,wo", "--model.converters="]
    assert read_settings(flags).resolved() == {
        "training": {"dataloader": {"num_workers": 2}},
        "mxnorm": {"filter_fqns": ["output", "wo"]},
    }


def test_the_module_is_for_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match="-m mxtrain.train needs torchrun"):
        train(["--job.config_file=llama3_debug"], verbose=False)


def test_a_run_whose_last_checkpoint_fails_ends_with_its_summary(tmp_path, monkeypatch, capfd):
    def fails(job_config):
        raise SaveError("checkpoint/step-4 cannot be written: No space left on device")

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("mxtrain.titan.train._train", fails)
    monkeypatch.setattr("mxtrain.titan.train.closing_summary", lambda folder: f"loss curve  {folder}/loss.png")
    with pytest.raises(SaveError):
        train(["--job.config_file=llama3_debug", f"--job.dump_folder={tmp_path}"], verbose=False)
    assert f"loss curve  {tmp_path}/loss.png" in capfd.readouterr().out
