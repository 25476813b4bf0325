"""What TorchTitan 0.3's trainer logs of a step."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn as nn

from mxtrain.titan.v03.trainer import LoggingTrainer


def logged_step(losses: list[float], error: Exception | None = None) -> mock.Mock:
    """Do step 7 with these losses of its microbatches, and return the processor of its metrics."""
    one, weight, left = object.__new__(LoggingTrainer), nn.Parameter(torch.ones(2)), list(losses)

    def forward_backward_step(**kwargs):
        loss = left.pop(0) * weight.sum() / 2
        loss.backward()
        return loss

    one.forward_backward_step = forward_backward_step
    one.step, one.ntokens_seen, one.device = 7, 64, torch.device("cpu")
    one.config = SimpleNamespace(training=SimpleNamespace(max_norm=1.0, disable_cuda_graphs=True))
    has_none = dict.fromkeys(("dp_enabled", "dp_cp_enabled", "pp_enabled", "ep_enabled"), False)
    one.parallel_dims = SimpleNamespace(**has_none, get_optional_mesh=lambda name: None)
    one.model_parts = [nn.ParameterList([weight])]
    one.gradient_accumulation_steps, one.num_pipeline_parallel_microbatches = len(losses), 1
    one.optimizers, one.checkpointer, one.metrics_processor = mock.Mock(), mock.Mock(), mock.Mock()
    one.optimizers.step.side_effect = error
    one.lr_schedulers = mock.Mock(get_metrics=lambda: {"lr": 0.5})
    batch = {"input": torch.zeros(1, 4, dtype=torch.long)}, torch.zeros(1, 4, dtype=torch.long)
    one.train_step(iter([batch] * len(losses)))
    one.lr_schedulers.step.assert_called_once_with()
    return one.metrics_processor


@pytest.mark.parametrize("losses", [[0.5, 1.5], [2.0, math.nan], [-math.inf, 1.0]])
def test_every_loss_is_logged_once(losses):
    loss = sum(losses)
    norm = float(torch.tensor([loss / 2] * 2).norm())
    expected = mock.call.log(7, loss, loss, norm, extra_metrics={"n_tokens_seen": 64, "lr": 0.5})
    assert repr(logged_step(losses).mock_calls[1:]) == repr([expected])  # NaN is not equal to itself


def test_another_error_of_a_step_remains():
    with pytest.raises(RuntimeError, match="^out of memory$"):
        logged_step([0.5], RuntimeError("out of memory"))
