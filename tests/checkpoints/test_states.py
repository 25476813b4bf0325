"""What a checkpoint holds beside weights: random numbers, the count of tokens, optimizer and schedule."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from mxtrain.checkpoints import states as module
from mxtrain.checkpoints.states import RandomState, TokenCount, apply_settings
from mxtrain.titan.releases import engine
from tests.support.releases import parallel_dims


def draw() -> list[float]:
    draws = [random.random(), np.random.random(), torch.rand(()).item()]
    return draws + ([torch.rand((), device="cuda").item()] if torch.cuda.is_available() else [])


def pretend(monkeypatch, rank: int, states: list[dict]) -> None:
    """Pretend to be ``rank`` of as many processes as there are ``states``, which are the states of all ranks."""
    monkeypatch.setattr(module, "gather", lambda own: states)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: len(states))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)


@pytest.fixture
def states() -> list[dict]:
    """The states of three ranks, all different."""
    states = []
    for _ in range(3):
        states.append(module._states())
        draw()
    return states


def test_every_rank_gets_its_own_states_back(monkeypatch, states):
    expected = []
    for own in states:
        module._restore(own)
        expected.append(draw())
    assert all(len({draws[i] for draws in expected}) == 3 for i in range(len(expected[0]))), "all generators move"
    for rank in (2, 0, 1):
        pretend(monkeypatch, rank, states)
        RandomState().load_state_dict(RandomState().state_dict())
        assert draw() == expected[rank]


@pytest.mark.parametrize("rank, processes", [(0, 2), (1, 2), (3, 4), (0, 4)])
def test_with_other_processes_the_generators_stay_as_they_are(monkeypatch, caplog, states, rank, processes):
    pretend(monkeypatch, 0, states)
    saved = RandomState().state_dict()
    pretend(monkeypatch, rank, [{}] * processes)
    module._restore(states[0])
    expected = draw()
    module._restore(states[0])
    caplog.set_level("INFO")
    RandomState().load_state_dict(saved)
    assert draw() == expected
    line = f"generators of 3 process(es), and this run has {processes}: the generators start from the seed"
    assert [record.message.endswith(line) for record in caplog.records] == ([True] if rank == 0 else [])


def test_a_checkpoint_of_three_processes_loads_on_one(tmp_path, monkeypatch, states):
    """DCP finds all the keys that it looks for."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "gather", lambda own: states)
        dcp.save({"rng": RandomState()}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"rng": RandomState()}, checkpoint_id=tmp_path, no_dist=True)


def test_one_process_without_torch_distributed(tmp_path):
    dcp.save({"rng": RandomState()}, checkpoint_id=tmp_path, no_dist=True)
    expected = draw()
    dcp.load({"rng": RandomState()}, checkpoint_id=tmp_path, no_dist=True)
    assert draw() == expected


@pytest.mark.parametrize("layouts", [[4, 2, 1, 4], [1, 3, 2], [8, 3, 5]])
def test_the_count_goes_on_over_other_numbers_of_ranks(layouts):
    """Three ranks cannot share evenly what eight have seen, nor two what three have seen."""
    total = 0
    for ranks in layouts:
        counts = [TokenCount(ranks, rank) for rank in range(ranks)]
        seen = [count.share(total) for count in counts]
        assert sum(seen) == total and max(seen) - min(seen) <= 1
        for _ in range(7):
            seen = [tokens + 17 for tokens in seen]
            total += 17 * ranks
            assert sum(seen) == total
            assert {count.of_all_ranks(tokens) for count, tokens in zip(counts, seen)} == {total}


def test_a_new_run_counts_from_zero():
    assert [TokenCount(3, rank).of_all_ranks(10) for rank in range(3)] == [30] * 3


def build(steps=10, implementation="foreach", **optimizer):
    """A model of two parts, its optimizers and schedulers."""
    # Under TorchTitan 0.3, tests/titan/test_resume.py resumes runs with other settings.
    titan = pytest.importorskip("torchtitan.components.lr_scheduler", reason="optimizers and schedules of 0.2.2")
    from torchtitan.components.optimizer import build_optimizers

    config = engine().JobConfig()
    config.lr_scheduler.warmup_steps = 2
    config.optimizer.implementation = implementation
    for name, value in optimizer.items():
        setattr(config.optimizer, name, value)
    torch.manual_seed(0)
    parts = [torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4)}), torch.nn.ModuleDict({"b": torch.nn.Linear(4, 2)})]
    optimizers = build_optimizers(parts, config.optimizer, parallel_dims())
    return parts, optimizers, titan.build_lr_schedulers(optimizers, config.lr_scheduler, steps)


def train(run, steps: int) -> None:
    parts, optimizers, schedulers = run
    for _ in range(steps):
        optimizers.zero_grad()
        parts[1]["b"](parts[0]["a"](torch.ones(3, 4))).square().sum().backward()
        optimizers.step()
        schedulers.step()


def load(run, saved) -> None:
    """As a checkpoint is loaded: weights, optimizer and schedule of another run."""
    for part, other in zip(run[0], saved[0], strict=True):
        part.load_state_dict(other.state_dict())
    with warnings.catch_warnings(action="ignore"):
        run[1].load_state_dict(copy.deepcopy(saved[1].state_dict()))
    run[2].load_state_dict(saved[2].state_dict())


def everything(run) -> list:
    groups = [
        {k: v for k, v in group.items() if k != "params"} for one in run[1].optimizers for group in one.param_groups
    ]
    schedules = [(s.base_lrs, s.last_epoch, s.get_last_lr()) for s in run[2].schedulers]
    weights = [parameter.tolist() for part in run[0] for parameter in part.parameters()]
    return [groups, schedules, weights]


@pytest.fixture
def saved():
    run = build(lr=0.1)
    train(run, 5)
    return run


def test_same_settings_change_no_bit(saved):
    resumed = build(lr=0.1)
    load(resumed, saved)
    kept, present = apply_settings(resumed[1], resumed[2])
    assert kept == present
    assert everything(resumed) == everything(saved)
    for run in (saved, resumed):
        train(run, 5)
    assert everything(resumed) == everything(saved)


def test_every_setting_of_the_optimizer_takes_effect(saved):
    new = {"lr": 0.02, "beta1": 0.5, "beta2": 0.75, "eps": 1e-3, "weight_decay": 0.25, "implementation": "for-loop"}
    resumed = build(**new)
    load(resumed, saved)
    assert resumed[1].optimizers[0].param_groups[0]["eps"] == 1e-8, "loading brings the old settings"
    kept, present = apply_settings(resumed[1], resumed[2])
    assert kept == 0.1 * saved[2].schedulers[0].lr_lambdas[0](5)
    assert present == pytest.approx(kept / 5)
    for optimizer, scheduler in zip(resumed[1].optimizers, resumed[2].schedulers, strict=True):
        (group,) = optimizer.param_groups
        assert group["betas"] == (0.5, 0.75) and (group["eps"], group["weight_decay"]) == (1e-3, 0.25)
        assert not group["foreach"] and not group["fused"]
        assert scheduler.base_lrs == [0.02] and scheduler.get_last_lr() == [group["lr"]] == [present]
        assert scheduler.last_epoch == 5
    train(resumed, 1)
    last = [scheduler.lr_lambdas[0](6) * 0.02 for scheduler in resumed[2].schedulers]
    assert [one.param_groups[0]["lr"] for one in resumed[1].optimizers] == last


def test_a_longer_schedule_goes_on_from_the_step(saved):
    resumed = build(steps=100, lr=0.1)
    load(resumed, saved)
    kept, present = apply_settings(resumed[1], resumed[2])
    assert present == 0.1 * build(steps=100)[2].schedulers[0].lr_lambdas[0](5) > kept


def test_adam_does_not_stay_adamw(saved):
    resumed = build(lr=0.1, name="Adam")
    load(resumed, saved)
    assert resumed[1].optimizers[0].param_groups[0]["decoupled_weight_decay"]
    apply_settings(resumed[1], resumed[2])
    assert not resumed[1].optimizers[0].param_groups[0]["decoupled_weight_decay"]


@pytest.mark.parametrize("before, now", [("foreach", "fused"), ("fused", "for-loop"), ("for-loop", "foreach")])
def test_another_implementation_trains_on(before, now, device):
    first, second = build(implementation=before), build(implementation=now)
    train(first, 3)
    load(second, first)
    apply_settings(second[1], second[2])
    train(second, 1)
    train(first, 1)
    for ours, theirs in zip(everything(second)[2], everything(first)[2], strict=True):
        assert torch.tensor(ours).cpu() == pytest.approx(torch.tensor(theirs).cpu(), rel=1e-5)


def test_without_the_optimizers_state_the_schedule_decides(saved):
    """checkpoint.exclude_from_loading = ["optimizer"]: TorchTitan would take one step at the first step's rate."""
    resumed = build(lr=0.1)
    resumed[2].load_state_dict(saved[2].state_dict())
    apply_settings(resumed[1], resumed[2])
    assert resumed[1].optimizers[0].param_groups[0]["lr"] == saved[1].optimizers[0].param_groups[0]["lr"]
