"""Runs that resume (see training_runs): bit for bit as they were, and with other settings."""

import json

import pytest
import tomli
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from mxtrain.analysis import load_run
from tests.support.training_runs import SAVE_EACH, Resumed, done_once, seeds, steps


def numbers(outcome) -> list[tuple]:
    names = ("step", "loss", "max_loss", "grad_norm", "lr", "tokens_seen")
    return [tuple(row.get(name) for name in names) for row in outcome.rows]


def content(outcome, step: int) -> dict:
    """Everything in a checkpoint but the data loader's own state, whose form is not for this test."""
    states: dict = {}
    reader = FileSystemReader(outcome.folder / "checkpoint" / f"step-{step}")
    _load_state_dict(states, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    states.pop("dataloader", None)
    return states


def require_same_content(ours, theirs) -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            require_same_content(ours[key], theirs[key])
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    else:
        assert ours == theirs


def require_exact(resumed, whole, last: int) -> None:
    assert numbers(resumed) == numbers(whole)
    assert [row["step"] for row in resumed.rows] == list(range(1, last + 1))
    ours, theirs = content(resumed, last), content(whole, last)
    parts = {name.partition(".")[0] for name in ours}
    assert {"layers", "optimizer", "train_state", "lr_scheduler"} <= parts, parts
    require_same_content(ours, theirs)
    # The copy had the rows of the whole run. Those after the checkpoint were replaced.
    first_new = len(resumed.rows) - 1
    assert resumed.rows[first_new]["time"] > whole.rows[-1]["time"]


@pytest.mark.parametrize("name", ["mxnorm", "nvfp4", "mixed", "qwen3"])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(one, name):
    require_exact(one[f"{name}, resumed"], one[name], 12)


def test_a_validation_after_a_checkpoint_changes_nothing(one):
    require_exact(one["validated, resumed"], one["validated"], 4)


def test_a_resumed_run_draws_the_random_bits_of_every_microbatch(one):
    require_exact(one["microbatches, resumed"], one["microbatches"], 2)


def test_muon_has_the_matrices_of_blocks_and_resumes_bit_for_bit(one):
    """Of a model with experts: their weights, gates and attention. AdamW has the rest."""
    require_exact(one["muon, resumed"], one["muon"], 2)
    modules = {"momentum_buffer": set(), "exp_avg": set()}
    for key in content(one["muon"], 2)["optimizer"]:
        name, _, state = key.rpartition(".")
        if state in modules:
            modules[state].add(name.removesuffix(".weight").rpartition(".")[2])
    assert modules["momentum_buffer"] == {"wq", "wk", "wv", "wo", "gate", "w1", "w2", "w3"}
    norms = {"norm", "attention_norm", "ffn_norm", "q_norm", "k_norm"}
    assert modules["exp_avg"] == {"tok_embeddings", "output", *norms}


@pytest.mark.parametrize("name", ["fsdp", "nvfp4, fsdp", "mixed, fsdp", "experts, fsdp"])
def test_two_processes_resume_bit_for_bit(several, name):
    require_exact(several[f"{name}, resumed"], several[name], 2)


@pytest.mark.sweep
def test_every_layout_resumes_bit_for_bit(base):
    """With selective activation checkpointing; some recipes round stochastically, and their random bits repeat."""
    layouts = {
        "hsdp": ("nvfp4_4over6", {"data_parallel_replicate": 2}),
        "tp x fsdp, muon": ("nvfp4_rl", {"tensor_parallel": 2}),
        "cp x tp": ("mxfp4", {"context_parallel": 2, "tensor_parallel": 2}),
        "pp x tp": ("nvfp4", {"pipeline_parallel": 2, "tensor_parallel": 2}),
        "pp x fsdp": ("fprop=mxfp8_2d, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2", {"pipeline_parallel": 2}),
    }
    sizes = ["--training.seq_len=128", "--training.local_batch_size=2", "--training.global_batch_size=8"]
    flags = [*SAVE_EACH, steps(2), *sizes, "--activation_checkpoint.mode=selective"]
    runs = {
        name: [*flags, f"--mxnorm.recipe={recipe}", *(f"--parallelism.{of}_degree={n}" for of, n in degrees.items())]
        for name, (recipe, degrees) in layouts.items()
    }
    runs["tp x fsdp, muon"] += ["--model.name=qwen3", "--optimizer.name=Muon"]
    runs |= {f"{name}, resumed": Resumed(name, 1) for name in [*runs]}
    found = done_once(base, "layouts that resume", 4, runs)
    for name in layouts:
        require_exact(found[f"{name}, resumed"], found[name], 2)


def test_an_unchanged_run_reports_no_change(one):
    output = one["mxnorm, resumed"].output[0]
    assert "resuming after step 6" in output and "changes from" not in output and "learning rate of" not in output


def test_another_learning_rate_is_applied_and_reported(one):
    changed, before = one["changed"], one["mxnorm"]
    lines = changed.output[0].splitlines()
    assert "optimizer.lr changes from 0.01 to 0.002 at step 7" in lines
    assert "training.steps changes from 12 to 8 at step 7" in lines
    of_run = load_run(changed.folder)
    assert [row["step"] for row in of_run.events] == [7]
    assert of_run.changed_settings == ["; ".join(line for line in lines if " changes from " in line)]
    rates = [row["lr"] for row in before.rows]
    assert f"learning rate of step 7: {rates[6] / 5:.4g} (was {rates[6]:.4g})" in lines
    assert numbers(changed)[:6] == numbers(before)[:6] and len(changed.rows) == 8
    assert [row["lr"] for row in changed.rows[6:]] == pytest.approx([rate / 5 for rate in rates[6:8]], rel=1e-12)
    # The loss of step 7 is that of the weights after step 6.
    assert changed.losses[6] == before.losses[6] and changed.losses[7] != before.losses[7]
    settings = tomli.loads((changed.folder / "config.toml").read_text())
    assert settings["optimizer"]["lr"] == 2e-3 and settings["training"]["steps"] == 8


def test_another_p_may_be_asked_for(one):
    allowed = one["another p, allowed"]
    assert "mxnorm.p changes from 2 to 1 at step 7" in allowed.output[0].splitlines()
    assert allowed.losses[:6] == one["mxnorm"].losses[:6] and allowed.losses[6] != one["mxnorm"].losses[6]


def test_a_finished_run_goes_on_with_more_steps(one):
    longer = one["longer"]
    assert numbers(longer)[:12] == numbers(one["mxnorm"]) and len(longer.rows) == 14
    assert longer.rows[13]["lr"] > 0 and "training.steps changes from 12 to 14 at step 13" in longer.output[0]


def test_a_finished_run_says_how_it_goes_on(one):
    done = one["done"]
    assert numbers(done) == numbers(one["mxnorm"])
    assert (
        "nothing is left to train: training.steps = 8; set it to more steps, such as --training.steps 24, and the "
        "run goes on"
    ) in done.output[0].splitlines()
    assert "fell over 12 steps" in done.output[0]
    assert json.loads((done.folder / "run.json").read_text())["world_size"] == 1


def test_a_seed_holds_only_weights(base):
    names = {name.partition(".")[0] for name in content(seeds(base)["dense"], 0)}
    assert names == {"layers", "tok_embeddings", "norm", "output"}
