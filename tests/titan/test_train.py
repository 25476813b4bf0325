"""The trainer from end to end (see training_runs), and mistakes in settings."""

import json
import statistics
import sys
import types

import pytest
import tomli
import tomli_w
import torch
from training_runs import CONFIG, MIXED_RECIPE, MIXED_RECIPES, Outcome, run_python

from mxtrain import ConfigError
from mxtrain.analysis import load_run
from mxtrain.rng.rounding_position import position_as_set, set_rounding_step
from mxtrain.titan.parse import non_default_values, parse_job_config
from mxtrain.titan.train import Trainer, _Trainer

LEARNERS = ("mxnorm", "exact", "post_round", "mx_linear", "mixed", "bf16", "nvfp4", "deepseek_v3", "llama4", "qwen3")


def test_every_variant_learns_and_each_computes_something_else(one):
    curves = {name: tuple(one[name].losses) for name in LEARNERS}
    for name, losses in curves.items():
        assert [row["step"] for row in one[name].rows] == list(range(1, 13)), name
        assert statistics.mean(losses[-3:]) < losses[0] - 0.7, name
        assert all(row["grad_norm"] > 0 for row in one[name].rows), name
    assert len(set(curves.values())) == len(LEARNERS)
    p1, p2 = one["p1"].losses, one["mxnorm"].losses
    assert p1 != p2[:3] and p1[0] == pytest.approx(p2[0], rel=0.01)
    validated = load_run(one["deepseek_v3"].folder).validation
    assert [row["step"] for row in validated] == [1, 10]
    assert validated[1]["validation_loss"] < validated[0]["validation_loss"] - 0.5


def test_a_seed_fixes_the_curve(one):
    assert one["mxnorm again"].losses == one["mxnorm"].losses[:3]


def test_a_resumed_run_draws_the_random_bits_of_an_uninterrupted_run(one):
    numbers = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in one[name].rows] for name in ("parts, resumed", "whole")
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 2


def test_the_trainer_sets_step_and_microbatch(monkeypatch):
    seen = []

    def train_step(self, data_iterator):
        for _ in range(3):
            self.forward_backward_step(input_dict={}, labels=None)

    def forward_backward_step(self, **kwargs):
        seen.append(position_as_set("cpu").tolist())

    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr(Trainer, "forward_backward_step", forward_backward_step)
    trainer = object.__new__(_Trainer)
    for trainer.step in (7, 8):
        trainer.train_step(None)
    set_rounding_step(None)
    assert seen == [[7, 0, 0], [7, 1, 0], [7, 2, 0], [8, 0, 0], [8, 1, 0], [8, 2, 0]]


def test_a_run_records_its_settings(one):
    resolved = tomli.loads((one["mixed"].folder / "config.toml").read_text())
    assert resolved["mxnorm"] == {"recipe": MIXED_RECIPE, "recipes": MIXED_RECIPES}
    assert list(resolved["mxnorm"]["recipes"]) == list(MIXED_RECIPES)  # the last match wins
    assert resolved["training"] == {**CONFIG["training"], "dataset_path": resolved["training"]["dataset_path"]}
    assert resolved["model"] == {"flavor": "tiny", "converters": ["mxnorm"]}  # the name is the default
    assert "config_file" not in resolved["job"]
    facts = json.loads((one["mixed"].folder / "run.json").read_text())
    assert facts["recipe"] == MIXED_RECIPE and facts["recipes"] == MIXED_RECIPES
    assert tomli.loads((one["p1"].folder / "config.toml").read_text())["mxnorm"] == {"p": 1}


MISTAKES = {
    "filter": "filter_fqns: 'outputs' matches no module",
    "recipe by name": "recipes: 'layer.0' matches no module; the top-level",
    "nothing to convert": "finds nothing to convert",
    "dataset": "training.dataset",
    "dataset path": "/no/such/text.jsonl",
    "tokenizer": "model.hf_assets_path",
}


def require_one_line(outcome: Outcome, message: str) -> None:
    assert set(outcome.statuses) == {2}, outcome.output
    errors = [line for line in outcome.output[0].splitlines() if line.startswith("mxtrain: error: ")]
    assert len(errors) == 1 and message in errors[0], outcome.output[0]
    assert "Traceback" not in outcome.output[0]
    assert not (outcome.folder / "metrics.jsonl").exists()


def test_mistakes_found_before_training_print_one_line(one):
    for run, message in MISTAKES.items():
        require_one_line(one[run], message)


def test_a_mistake_that_two_workers_find_prints_one_line(several):
    require_one_line(several["pipeline"], "pipeline_parallel_degree = 2")


def test_names_that_the_users_own_module_may_register_are_checked_after_it_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_models", types.ModuleType("own_models"))
    own = ["--experimental.custom_import=own_models"]
    for flag, message in [
        ("--model.name=llama9", "model.name = 'llama9' is not one of"),
        ("--model.flavor=9B", "model.flavor = '9B' is not one of"),
        ("--model.converters=mxnrom", "model.converters = 'mxnrom' is not one of"),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse_job_config([*own, flag])


def test_a_mode_that_this_machine_lacks_is_refused(monkeypatch):
    # As on a machine without a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("torchtitan.tools.utils.device_type", "cpu")
    with pytest.raises(ConfigError, match="mode = 'native' cannot run here"):
        parse_job_config(["--model.converters=mxnorm", "--mxnorm.mode=native"])


def test_a_recorded_config_runs_again_under_torchtitan_alone(command_run, tmp_path):
    resolved = tomli.loads((command_run.folder / "config.toml").read_text())
    resolved["job"]["dump_folder"] = str(tmp_path / "again")
    resolved["metrics"].pop("enable_wandb")
    (tmp_path / "resolved.toml").write_text(tomli_w.dumps(resolved))
    process = run_python("torchtitan.train", f"--job.config_file={tmp_path / 'resolved.toml'}", RANK="0")
    assert process.returncode == 0, process.stderr[-4000:]
    again = [row["loss"] for row in load_run(tmp_path / "again").training]
    assert again == [row["loss"] for row in load_run(command_run.folder).training]
    assert "root - INFO - mxnorm mxfp8 p=2 (reference): " in process.stdout  # no terminal of ours: TorchTitan's logger
    assert not (tmp_path / "again" / "conversion.txt").exists()


def test_a_config_that_extends_another(tmp_path):
    (tmp_path / "base.toml").write_text('[mxnorm]\np = 2\nestimator = "exact"\n')
    (tmp_path / "variant.toml").write_text('extends = "base.toml"\n[mxnorm]\np = 1\n')
    job_config = parse_job_config(["--job.config_file", str(tmp_path / "variant.toml"), "--mxnorm.eps", "1e-6"])
    assert (job_config.mxnorm.p, job_config.mxnorm.estimator, job_config.mxnorm.eps) == (1, "exact", 1e-6)


def test_only_settings_that_differ_from_the_defaults_are_written():
    flags = ["--training.dataloader.num_workers=2", "--mxnorm.filter_fqns=output,wo", "--model.converters="]
    assert non_default_values(parse_job_config(flags)) == {
        "training": {"dataloader": {"num_workers": 2}},
        "mxnorm": {"filter_fqns": ["output", "wo"]},
    }
