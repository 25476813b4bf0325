import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from mxtrain.checkpoints import random_state
from mxtrain.checkpoints.random_state import RandomState


def draw() -> list[float]:
    draws = [random.random(), np.random.random(), torch.rand(()).item()]
    return draws + ([torch.rand((), device="cuda").item()] if torch.cuda.is_available() else [])


def pretend(monkeypatch, rank: int, states: list[dict]) -> None:
    """Pretend to be ``rank`` of as many processes as there are ``states``, which are the states of all ranks."""
    monkeypatch.setattr(random_state, "gather", lambda own: states)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: len(states))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)


@pytest.fixture
def states() -> list[dict]:
    """The states of three ranks, all different."""
    states = []
    for _ in range(3):
        states.append(random_state._states())
        draw()
    return states


def test_every_rank_gets_its_own_states_back(monkeypatch, states):
    expected = []
    for own in states:
        random_state._restore(own)
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
    random_state._restore(states[0])
    expected = draw()
    random_state._restore(states[0])
    caplog.set_level("INFO")
    RandomState().load_state_dict(saved)
    assert draw() == expected
    line = f"generators of 3 process(es), and this run has {processes}: the generators start from the seed"
    assert [record.message.endswith(line) for record in caplog.records] == ([True] if rank == 0 else [])


def test_a_checkpoint_of_three_processes_loads_on_one(tmp_path, monkeypatch, states):
    """DCP finds all the keys that it looks for."""
    with monkeypatch.context() as patch:
        patch.setattr(random_state, "gather", lambda own: states)
        dcp.save({"rng": RandomState()}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"rng": RandomState()}, checkpoint_id=tmp_path, no_dist=True)


def test_one_process_without_torch_distributed(tmp_path):
    dcp.save({"rng": RandomState()}, checkpoint_id=tmp_path, no_dist=True)
    expected = draw()
    dcp.load({"rng": RandomState()}, checkpoint_id=tmp_path, no_dist=True)
    assert draw() == expected
