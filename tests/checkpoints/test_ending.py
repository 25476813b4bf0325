import math
import signal

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mxtrain.checkpoints.ending import LossWatch, NonFiniteError, describe, nonfinite

CPU = torch.device("cpu")


def losses(*values):
    return [torch.tensor(value) for value in values]


def test_values_are_named_with_their_ranks():
    assert describe([1.0, math.nan, math.inf, math.nan]) == "nan on rank 1, inf on rank 2, nan on rank 3"
    assert describe([-math.inf, 1.0]) == "-inf on rank 0"
    assert describe([math.nan] * 12).endswith(", nan on rank 6, nan on rank 7 and 4 more")


def test_a_loss_is_found_at_its_own_step_even_if_it_is_read_later():
    watch = LossWatch(CPU, stops=True)
    watch.record(1, losses(1.0))
    watch.look(at_last_step=False)
    watch.record(2, losses(1.0, math.nan))
    watch.look(at_last_step=False)  # reads step 1
    watch.record(3, losses(1.0))
    with pytest.raises(NonFiniteError, match="^step 2: the loss is nan on rank 0$"):
        watch.look(at_last_step=False)


def test_the_last_step_is_read_when_asked():
    watch = LossWatch(CPU, stops=True)
    watch.record(1, losses(math.inf, -math.inf))
    with pytest.raises(NonFiniteError, match="^step 1: the loss is nan on rank 0$"):
        watch.look(at_last_step=True)


def test_a_warning_for_every_time_that_losses_stop_being_finite(caplog):
    watch = LossWatch(CPU, stops=False)
    for step, value in enumerate([1.0, math.nan, math.nan, 1.0, math.inf], start=1):
        watch.record(step, losses(value))
        watch.look(at_last_step=True)
    end = 'training goes on (metrics.on_nonfinite_loss = "continue")'
    assert caplog.messages == [f"step 2: the loss is nan on rank 0; {end}", f"step 5: the loss is inf on rank 0; {end}"]


def of_weights(*models):
    return nonfinite({"weights": [t for m in models for t in (*m.parameters(), *m.buffers())]}, CPU)


def test_the_first_group_that_is_not_finite_is_named():
    groups = {"weights": losses(1.0), "optimizer states": losses(1.0, math.inf), "more": losses(math.nan), "none": []}
    assert nonfinite(groups, CPU) == ("optimizer states", "inf on rank 0")
    assert nonfinite({"weights": losses(1.0), "none": []}, CPU) is None


def test_one_weight_that_is_not_finite_is_found(bad=-math.inf):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(torch.bfloat16)
    model.register_buffer("angles", torch.full((2,), math.nan, dtype=torch.complex64))  # no floats
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0)))  # as a shard may be
    assert of_weights(model) is None
    model[1].running_var[2] = bad
    assert of_weights(model) == ("weights", "inf on rank 0")
    model[1].running_var[2] = 3e38
    model[0].weight.data[:] = 3e38  # large, and finite
    assert of_weights(torch.nn.Linear(2, 2), model) is None
    model[0].weight.data[3, 3] = bad
    assert of_weights(model, model) is not None


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_tensors_are_read_from_their_shards(group):
    mesh = init_device_mesh("cpu", (1,))
    watch = LossWatch(CPU, stops=True)
    watch.record(1, [DTensor.from_local(torch.tensor(math.nan), mesh, [Replicate()])])
    with pytest.raises(NonFiniteError):
        watch.look(at_last_step=True)
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(DTensor.from_local(torch.tensor([[1.0, math.nan]]), mesh, [Shard(0)]))
    assert of_weights(model) == ("weights", "nan on rank 0")


def test_every_rank_has_its_place_in_the_reduction_and_a_stop_signal_is_read_with_its_step(group, monkeypatch):
    def from_rank_0(values):
        assert values.tolist() == [[0.0, 0.0], [1.0, 0.0]]
        values[0] = torch.tensor([2.0, signal.SIGUSR1])

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "all_reduce", from_rank_0)
    watch = LossWatch(CPU, stops=True)
    watch.record(1, losses(1.0))
    watch.look(at_last_step=False)
    assert watch.stop_signal is None  # the step may still run on the device
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: None)
    watch.record(2, losses(1.0), received=signal.SIGTERM)
    watch.look(at_last_step=False)
    assert watch.stop_signal is signal.SIGUSR1
    watch.look(at_last_step=True)
    assert watch.stop_signal is signal.SIGUSR1  # the first one
