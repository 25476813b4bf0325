"""Every repair is still needed: a test per fault of TorchTitan 0.2.2, which fails with a release that mends it.

A fault that takes a whole training to see is looked up in TorchTitan's source.
"""

import inspect
from pathlib import Path

import torchtitan.models.llama3.infra.parallelize as llama3
import torchtitan.models.qwen3.infra.parallelize as qwen3
from torchtitan.components.validate import Validator
from torchtitan.distributed import NoParallel, ParallelDims
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.tools import utils
from torchtitan.train import Trainer


def source(thing) -> str:
    return " ".join(inspect.getsource(thing).split())


def test_replicas():
    """Replicas without shards get PyTorch's DDP, which averages their gradients."""
    dims = ParallelDims(dp_replicate=2, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=2)
    assert not dims.fsdp_enabled and "replicate(model, device_mesh=dp_mesh" in source(llama3.apply_ddp)


def test_pipeline():
    """The sum of the losses is divided after the backward."""
    step = source(Trainer.forward_backward_step)
    assert step.index("self.pp_schedule.step(") < step.index("torch.sum(torch.stack(losses)) / global_valid_tokens")


def test_context_parallel():
    assert "ntokens_batch = labels.numel() self.ntokens_seen += ntokens_batch" in source(Trainer.batch_generator)
    validate = source(Validator.validate)
    assert validate.index("local_valid_tokens += (labels != IGNORE_INDEX).sum()") < validate.index('get_mesh("cp")')
    assert "m.freqs_cis for m in model_parts" in validate and "self.freqs_cis" not in source(Qwen3Model)


def test_expert_gradients():
    """Pull request 2416 adds the placements of a gate's gradient."""
    assert not any("grad" in name for name in inspect.signature(NoParallel).parameters)


def test_tied_weights():
    """Embedding and head are sharded apart."""
    shard = source(llama3.apply_fsdp)
    assert "fully_shard( model.tok_embeddings," in shard and "fully_shard( [model.norm, model.output]," in shard


def test_qwen3_heads():
    assert '"attention.wq": colwise_parallel(use_local_output=False)' in source(qwen3.apply_non_moe_tp)


def test_cpu():
    assert '_get_available_device_type() or "cuda"' in source(utils.get_device_info)


def test_memory_that_is_kept_between_asynchronous_saves():
    """PyTorch 2.11, the oldest release that is supported."""
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '"torch>=2.11,' in project
