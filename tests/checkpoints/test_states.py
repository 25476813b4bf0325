"""What a checkpoint holds beside weights: random numbers, the count of tokens, optimizer and schedule."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from mxtrain.checkpoints import states as module
from mxtrain.checkpoints.states import RandomState, TokenCount, apply_settings


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


def test_with_other_processes_the_generators_stay_as_they_are(tmp_path, monkeypatch, caplog, states):
    with monkeypatch.context() as patch:
        patch.setattr(module, "gather", lambda own: states)
        dcp.save({"rng": RandomState()}, checkpoint_id=tmp_path, no_dist=True)
        saved = RandomState().state_dict()
    module._restore(states[0])
    expected = draw()
    caplog.set_level("INFO", logger=module.__name__)
    for rank, processes in ((1, 2), (0, 4)):
        module._restore(states[0])
        pretend(monkeypatch, rank, [{}] * processes)
        RandomState().load_state_dict(saved)
        assert draw() == expected
    line = "generators of 3 process(es), and this run has 4: the generators start from the seed"
    assert [r.message.endswith(line) for r in caplog.records if r.name == module.__name__] == [True]
    monkeypatch.undo()
    dcp.load({"rng": RandomState()}, checkpoint_id=tmp_path, no_dist=True)  # DCP finds all the keys that it looks for


def test_the_count_goes_on_over_other_numbers_of_ranks():
    """Three ranks cannot share evenly what eight have seen, nor two what three have seen."""
    total = 0
    for ranks in (8, 3, 2, 1, 5):
        counts = [TokenCount(ranks, rank) for rank in range(ranks)]
        seen = [count.share(total) for count in counts]
        assert sum(seen) == total and max(seen) - min(seen) <= 1
        for _ in range(7):
            seen = [tokens + 17 for tokens in seen]
            total += 17 * ranks
            assert sum(seen) == total
            assert {count.of_all_ranks(tokens) for count, tokens in zip(counts, seen)} == {total}


def build(steps=10, lr=0.1, **options):
    """A model, its optimizers and schedules, as TorchTitan's containers hold them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3) * (1 - step / steps))
    return model, SimpleNamespace(optimizers=[optimizer]), SimpleNamespace(schedulers=[schedule])


def train(run, steps: int) -> None:
    model, optimizers, schedules = run
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizers.optimizers[0].step()
        schedules.schedulers[0].step()


def resumed(saved, **settings):
    """Another run, into which weights, optimizer and schedule are loaded as from a checkpoint."""
    run = build(**settings)
    run[0].load_state_dict(saved[0].state_dict())
    run[1].optimizers[0].load_state_dict(copy.deepcopy(saved[1].optimizers[0].state_dict()))
    run[2].schedulers[0].load_state_dict(saved[2].schedulers[0].state_dict())
    return run


def everything(run) -> list:
    (optimizer,), (schedule,) = run[1].optimizers, run[2].schedulers
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return [group, schedule.base_lrs, schedule.last_epoch, schedule.get_last_lr(), run[0].weight.tolist()]


@pytest.fixture
def saved():
    run = build()
    train(run, 5)
    return run


def test_same_settings_change_no_bit(saved):
    again = resumed(saved)
    kept, present = apply_settings(*again[1:])
    assert kept == present and everything(again) == everything(saved)
    for run in (saved, again):
        train(run, 5)
    assert everything(again) == everything(saved)


def test_every_setting_of_the_optimizer_takes_effect(saved):
    again = resumed(saved, lr=0.02, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.25, foreach=False)
    (optimizer,), (schedule,) = again[1].optimizers, again[2].schedulers
    assert optimizer.param_groups[0]["eps"] == 1e-8, "loading brings the old settings"
    kept, present = apply_settings(*again[1:])
    assert kept == 0.1 * schedule.lr_lambdas[0](5) and present == pytest.approx(kept / 5)
    (group,) = optimizer.param_groups
    assert group["betas"] == (0.5, 0.75) and (group["eps"], group["weight_decay"]) == (1e-3, 0.25)
    assert not group["foreach"] and not group["fused"]
    assert schedule.base_lrs == [0.02] and schedule.get_last_lr() == [group["lr"]] == [present]
    train(again, 1)
    assert group["lr"] == schedule.lr_lambdas[0](6) * 0.02
    again = resumed(saved, steps=100)  # a longer schedule goes on from the step
    _, present = apply_settings(*again[1:])
    assert present == 0.1 * build(steps=100)[2].schedulers[0].lr_lambdas[0](5) > kept


@pytest.mark.parametrize("before, now", [("foreach", "fused"), ("fused", "foreach")])
def test_another_implementation_trains_on(before, now):
    first = build(**{before: True})
    train(first, 3)
    second = resumed(first, **{now: True})
    apply_settings(*second[1:])
    for run in (first, second):
        train(run, 1)
    assert second[0].weight.flatten().tolist() == pytest.approx(first[0].weight.flatten().tolist(), rel=1e-5)


def test_without_the_optimizers_state_the_schedule_decides(saved):
    """checkpoint.exclude_from_loading = ["optimizer"]: TorchTitan would take one step at the first step's rate."""
    again = build()
    again[2].schedulers[0].load_state_dict(saved[2].schedulers[0].state_dict())
    apply_settings(*again[1:])
    assert again[1].optimizers[0].param_groups[0]["lr"] == saved[1].optimizers[0].param_groups[0]["lr"]
