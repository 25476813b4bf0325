"""What TorchTitan 0.2.2 is told: specs, the validator over held-out text, counts of tokens on a CPU."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchtitan.config import Optimizer
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils

import mxtrain.titan  # noqa: F401  registers the models
from mxtrain.titan.data import build_tokenizer, prepare_from_job
from mxtrain.titan.v02.train_specs import build_validator, histc
from tests.support.data_checks import VOCABULARY, files_job, rows_of
from tests.support.releases import parallel_dims


@pytest.mark.parametrize("name", ["llama4", "qwen3", "deepseek_v3"])
def test_a_step_balances_the_load_of_experts(name):
    torch.manual_seed(0)
    block = nn.Module()
    block.moe, block.moe_enabled = MoE(MoEArgs(num_experts=4, top_k=1, use_grouped_mm=False), 8, 8), True
    with torch.no_grad():
        block.moe.init_weights(0.1, torch.device("cpu"))
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    layout = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, pp_enabled=False)
    optimizers = get_train_spec(name).build_optimizers_fn([model], Optimizer(implementation="for-loop"), layout)
    block.moe(torch.randn(1, 10, 8)).sum().backward()
    counts = block.moe.tokens_per_expert.clone()
    assert counts.sum() == 10 and not block.moe.expert_bias.any()
    optimizers.step()
    moves = 1e-3 * torch.sign(2.5 - counts)
    torch.testing.assert_close(block.moe.expert_bias, moves - moves.mean())
    assert not block.moe.tokens_per_expert.any()


pytestmark = pytest.mark.usefixtures("own_folder")


class Bigrams(nn.Sequential):
    """The smallest model: the next token's logits from this token."""

    def get_attention_masks(self, **inputs):
        raise TypeError("none needed")  # what TorchTitan's models do then


class Recorder:
    """Stands in for the metrics processor."""

    def __init__(self):
        self.ntokens_since_last_log = 0
        self.losses = []

    def log_validation(self, loss, step):
        self.losses.append(loss)


def validator(config, dp_world_size=1, dp_rank=0):
    return build_validator(
        job_config=config,
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        tokenizer=build_tokenizer(config),
        parallel_dims=parallel_dims(),
        loss_fn=lambda output, labels: nn.functional.cross_entropy(
            output.flatten(0, 1), labels.flatten(), reduction="sum"
        ),
        validation_context=nullcontext,
        maybe_enable_amp=nullcontext(),
        metrics_processor=Recorder(),
        pp_schedule=None,
        pp_has_first_stage=None,
        pp_has_last_stage=None,
    )


@pytest.mark.parametrize("steps", [-1, 3])
def test_torchtitans_validator_runs_on_held_out_text(corpus, steps):
    config = files_job(corpus, "--validation.enable", "--validation.dataset=files", f"--validation.steps={steps}")
    held_out = validator(config)
    tokens = prepare_from_job(config).validation
    chunks = {tuple(tokens[i : i + 17].tolist()) for i in range(0, len(tokens) - 16, 17)}
    rows = rows_of(held_out.validation_dataloader)
    assert set(rows) <= chunks and len(rows) == len(chunks) // 4 * 4
    torch.manual_seed(0)
    model = Bigrams(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)).to(utils.device_type)
    for step in (1, 2):
        held_out.validate([model], step)
    first, second = held_out.metrics_processor.losses
    # The same text twice; but the last bit of a mean may differ from run to run on a GPU.
    assert second == pytest.approx(first, rel=1e-6) and abs(first - math.log(VOCABULARY)) < 1
    read = 2 * 3 * 4 * 16 if steps == 3 else 2 * len(rows) * 16
    assert held_out.metrics_processor.ntokens_since_last_log == read


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_histc_counts_integers(dtype):
    chosen = torch.tensor([[0, 2], [2, 3], [3, 3]])
    counts = histc(chosen.to(dtype), bins=4, min=0, max=4)
    assert counts.dtype == dtype and counts.tolist() == [1, 0, 2, 3]
