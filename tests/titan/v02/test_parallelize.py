"""The layout of other trainers is checked, and plans get mxtrain's styles."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn as nn
import torchtitan.models.llama3.infra.parallelize as llama3
import torchtitan.models.llama3.infra.parallelize as llama3_plans
import torchtitan.models.llama4.infra.parallelize as llama4
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInputOutput
from torch.distributed.tensor.placement_types import Placement
from torchtitan.distributed import NoParallel, ParallelDims
from torchtitan.distributed.expert_parallel import TensorParallel

from mxtrain import ConfigError
from mxtrain.parallel.initial_weights import shared_seed
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v02 import parallelize
from mxtrain.titan.v02.models import Llama3, Llama3Args
from mxtrain.titan.v02.parallelize import (
    Layout,
    check_layout,
    checked_parallelize,
    checked_pipeline,
    plans_with_own_styles,
    shared_group,
)
from mxtrain.titan.v02.tensor_parallel import Inner, SplitExperts
from tests.support.forked import forking_context

ONE_RANK = SimpleNamespace(get_optional_mesh=lambda name: None)


def dims(processes=1, kind=Layout, **degrees):
    usual = dict.fromkeys(["dp_replicate", "cp", "tp", "pp", "ep", "etp"], 1)
    return kind(**{**usual, "dp_shard": -1, **degrees, "world_size": processes})


def job(converters, **degrees):
    flags = [f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()]
    return parse_job_config([f"--model.converters={converters}", "--debug.seed=0", *flags])


@pytest.mark.parametrize(
    "kind, name", [("data_parallel_replicate", "dp_replicate"), ("pipeline_parallel", "pp"), ("tensor_parallel", "tp")]
)
def test_other_layouts_than_fsdp_need_mxtrains_trainer(kind, name):
    check_layout(dims(2, **{name: 2}))
    with pytest.raises(ConfigError, match=f"{kind}_degree = 2 needs mxtrain's trainer; train with -m mxtrain.train"):
        check_layout(dims(2, ParallelDims, **{name: 2}))


def test_fsdp_and_one_process_are_fine():
    check_layout(dims(1, ParallelDims))
    check_layout(dims(8, ParallelDims))


@pytest.mark.parametrize(
    "wrap, others, degree, name",
    [
        (checked_parallelize, 0, "data_parallel_replicate", "dp_replicate"),
        (checked_pipeline, 4, "pipeline_parallel", "pp"),
    ],
)
def test_the_layout_is_checked_before_the_model_is_touched(wrap, others, degree, name):
    touched = []
    wrapped = wrap(lambda model, dims, job: touched.append(model))
    with pytest.raises(ConfigError, match=f"{degree}_degree = 2"):
        wrapped("model", dims(2, ParallelDims, **{name: 2}), job("mxnorm", **{degree: 2}), *[None] * others)
    assert not touched


def test_plans_of_a_users_own_module_are_followed(monkeypatch):
    own, original = ModuleType("own_plans"), torch_parallel.parallelize_module
    own.parallelize_module = original
    monkeypatch.setitem(sys.modules, "own_plans", own)
    with plans_with_own_styles():
        assert own.parallelize_module is llama3_plans.parallelize_module is not original
        assert torch_parallel.parallelize_module is original, "which the replacement calls"
    assert own.parallelize_module is llama3_plans.parallelize_module is original


def mixture(output: Placement) -> tuple[nn.Module, dict]:
    block = nn.ModuleDict({"moe": nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": nn.Module()})})
    style = PrepareModuleInputOutput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        use_local_input=True,
        output_layouts=(output,),
        desired_output_layouts=(Shard(1),),
    )
    return block, {"moe": style, "moe.gate": NoParallel()}


@pytest.mark.parametrize(
    "output, expected", [(Partial(), (Inner, SplitExperts)), (Replicate(), (NoParallel, TensorParallel))]
)
def test_only_modules_within_a_boundary_get_parts_of_gradients(monkeypatch, output, expected):
    """The experts have a plan of their own, which does not say what is around them."""
    calls = []
    monkeypatch.setattr(parallelize, "parallelize_module", lambda module, mesh, plan: calls.append(plan))
    block, plan = mixture(output)
    own = ModuleType("own_plans")
    own.parallelize_module = parallelize.parallelize_module
    monkeypatch.setitem(sys.modules, "own_plans", own)
    with plans_with_own_styles():
        own.parallelize_module(block, None, plan)
        own.parallelize_module(block["moe"]["experts"], None, TensorParallel())
    of_block, of_experts = calls
    assert (type(of_block["moe.gate"]), type(of_experts)) == expected


def test_the_seed_is_the_jobs_or_the_one_that_all_ranks_share():
    def stage(number):
        return SimpleNamespace(get_optional_mesh={"pp": SimpleNamespace(get_local_rank=lambda: number)}.get)

    assert shared_seed(stage(3), 5) == 5 and shared_seed(ONE_RANK, 0) == 0
    for seed in (11, 2**64 - 2):
        for number in range(4):  # as TorchTitan seeds the ranks of a stage
            torch.manual_seed((seed + number) % 2**64)
            assert shared_seed(stage(number), None) == seed
        torch.manual_seed(seed)
        assert shared_seed(ONE_RANK, None) == seed


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
    own = torch.distributed.fsdp.fully_shard
    with shared_group(model(enable_weight_tying=True)):
        assert llama3.fully_shard is not own and llama4.fully_shard is not own
    assert llama3.fully_shard is llama4.fully_shard is own
    with shared_group(model()):
        assert llama3.fully_shard is llama4.fully_shard is own


@pytest.mark.parametrize("absent", ["output", "tok_embeddings"])
def test_stages_without_head_or_embedding_and_models_of_ones_own_are_not_tied(absent):
    stage = model(enable_weight_tying=True)
    setattr(stage, absent, None)
    for part in (stage, torch.nn.Sequential(torch.nn.Linear(2, 2))):
        with shared_group(part):
            assert llama3.fully_shard is fully_shard


@pytest.mark.parametrize("option, components, is_selective", [("op", "model", True), ("2", "loss", False)])
def test_a_layout_follows_the_settings_of_checkpointing_and_compilation(monkeypatch, option, components, is_selective):
    class Experts(nn.Module):
        def compile_products(self, backend):
            found.append(backend)

    found = []
    monkeypatch.setattr(parallelize, "finish_layout", lambda *args: found.append(args[-1]))
    monkeypatch.setattr(parallelize, "QuantizedExperts", Experts)
    flags = [f"--activation_checkpoint.selective_ac_option={option}", f"--compile.components={components}"]
    config = parse_job_config([*flags, "--activation_checkpoint.mode=selective", "--compile.enable"])
    checked_parallelize(lambda model, *_: model)(Experts(), dims(), config)
    assert found == ([True, "inductor"] if is_selective else [False])
