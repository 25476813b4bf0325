"""Repair of 0.2.2: the weight that embedding and head share stays one, in one FSDP group."""

import pytest
import torch
import torchtitan.models.llama3.infra.parallelize as llama3
import torchtitan.models.llama4.infra.parallelize as llama4
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from mxtrain.errors import ConfigError
from mxtrain.titan.v02.models.llama3 import Llama3, Llama3Args
from mxtrain.titan.v02.repairs.tied_weights import shared_group, stays_tied
from tests.support.forked import forking_context

SMALL = dict(dim=64, n_layers=2, n_heads=4, vocab_size=96, max_seq_len=32)
PRECISION = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def model(**changes):
    with torch.device("meta"):
        return Llama3(Llama3Args(**SMALL, **changes))


def count_groups(results):
    """Shard models for 4 processes that do not exist; put the number of weights in each FSDP group."""
    torch.distributed.init_process_group("fake", rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    for changes in ({"enable_weight_tying": True}, {}):
        module = model(**changes)
        with shared_group(module):
            llama3.apply_fsdp(module, mesh, **PRECISION, pp_enabled=False)
        groups = [len(group.fsdp_params) for group in groups_of(module)]
        results.put((sorted(groups), sum(p.numel() for p in module.parameters())))


def groups_of(module):
    states = {
        id(part._get_fsdp_state()): part._get_fsdp_state() for part in module.modules() if hasattr(part, "unshard")
    }
    return [group for state in states.values() for group in groups_of_state(state)]


def groups_of_state(state):
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    # PyTorch 2.11 has at most one.
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def test_the_shared_weight_is_in_one_group():
    """With two blocks of 9 weights. The second model has a weight of its own for the head."""
    context = forking_context()
    results = context.Queue()
    process = context.Process(target=count_groups, args=(results,))
    process.start()
    tied, separate = results.get(timeout=120), results.get(timeout=120)
    process.join()
    assert (tied[0], separate[0]) == ([2, 9, 9], [1, 2, 9, 9])
    assert separate[1] - tied[1] == 96 * 64


def test_titans_functions_are_as_they_were():
    with shared_group(model(enable_weight_tying=True)):
        assert llama3.fully_shard is not fully_shard and llama4.fully_shard is not fully_shard
    assert llama3.fully_shard is llama4.fully_shard is fully_shard
    with shared_group(model()):
        assert llama3.fully_shard is llama4.fully_shard is fully_shard


def test_a_tied_head_stays_tied_when_both_weights_are_split():
    tied, separate = model(enable_weight_tying=True), model()
    for module in (tied, separate):
        with stays_tied(module):
            for part in (module.output, module.tok_embeddings):
                part.weight = torch.nn.Parameter(part.weight.detach()[:48])
    assert tied.output.weight is tied.tok_embeddings.weight
    assert separate.output.weight is not separate.tok_embeddings.weight


def test_a_tied_head_that_is_split_in_another_way_is_refused():
    tied = model(enable_weight_tying=True)
    with pytest.raises(
        ConfigError, match=r"weight into \(Shard\(dim=1\),\), and the embedding into None: allowed is 1"
    ):
        with stays_tied(tied):
            tied.output.weight = torch.nn.Parameter(tied.output.weight.detach().clone())
            tied.output.weight.placements = (Shard(1),)


@pytest.mark.parametrize("absent", ["output", "tok_embeddings"])
def test_stages_without_head_or_embedding_and_models_of_ones_own_are_not_tied(absent):
    stage = model(enable_weight_tying=True)
    setattr(stage, absent, None)
    for part in (stage, torch.nn.Sequential(torch.nn.Linear(2, 2))):
        with stays_tied(part), shared_group(part):
            assert llama3.fully_shard is fully_shard
