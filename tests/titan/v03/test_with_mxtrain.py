"""Models of TorchTitan 0.3's own registry, converted for its own trainer."""

import os
from collections import Counter
from functools import partial
from importlib import import_module
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import debug
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.protocols import BaseModel
from torchtitan.trainer import Trainer

from mxtrain import ConfigError, MXNorm
from mxtrain.nn.group import LinearGroup
from mxtrain.titan import override_with_mxtrain, with_mxtrain
from mxtrain.titan.v03.config import built
from tests.support.cpu_layouts import use_layouts_on_a_cpu
from tests.support.layer_checks import in_two_processes


@override(target=BaseModel.Config)
def mxnorm(config, **settings):
    return override_with_mxtrain(config, mxnorm=settings)


ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def configured(config: Trainer.Config, batches, folder, **tables) -> Trainer.Config:
    """A config of a registry with a converted model of two layers, for a CPU. ``batches``: of the ranks' rows."""
    config.model_spec = with_mxtrain(config.model_spec, mxnorm=tables)
    return for_a_cpu(config, batches, folder)


def for_a_cpu(config: Trainer.Config, batches, folder) -> Trainer.Config:
    for layer in config.model_spec.model.layers:  # a CPU has no flex attention
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    del config.model_spec.model.layers[2:]
    config.dataloader = built(BaseDataLoader.Config, batches)()
    config.tokenizer = built(BaseTokenizer.Config, lambda **_: None)()
    config.training.seq_len, config.training.disable_cuda_graphs = 64, True
    config.activation_checkpoint, config.dump_folder = None, str(folder)
    return config


def losses_of(trainer: Trainer) -> list[float]:
    losses = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    trainer.train()
    return losses


@patch.dict(os.environ, ONE_PROCESS)  # restores what TorchTitan sets, too
def test_titans_trainer_trains_a_converted_model(tmp_path):
    tokens = torch.arange(65)[None] % 7
    batch = {"input": tokens[:, :-1], "positions": torch.arange(64)[None]}, tokens[:, 1:]
    plain = llama3_debugmodel().model_spec
    config = configured(llama3_debugmodel(), lambda **_: [batch] * 8, tmp_path, p=1, recipe="nvfp4")
    assert config.model_spec.model is not plain.model
    config.training.local_batch_size, config.training.steps = 1, 8
    try:
        trainer, joined, is_one_gemm = Trainer(config), [], LinearGroup.is_one_gemm
        with patch.object(LinearGroup, "is_one_gemm", lambda *args: joined.append(is_one_gemm(*args)) or joined[-1]):
            losses = losses_of(trainer)
        norm = trainer.model_parts[0].layers["0"].attention_norm
        assert isinstance(norm, MXNorm) and "p=1" in repr(norm) and "nvfp4" in repr(norm)
        assert losses[-1] < losses[0] - 1
        assert joined and all(joined), "the linears of a norm are one GEMM"
    finally:
        torch.distributed.destroy_process_group()


@patch.dict(os.environ, ONE_PROCESS)
def test_an_override_does_what_with_mxtrain_does(tmp_path):
    losses = []
    try:
        for make, imports in ((partial(configured, recipe="mxfp8"), []), (for_a_cpu, [f"{__name__}.mxnorm"])):
            config = make(llama3_debugmodel(), _batches, tmp_path)
            config.override.imports = [(name, {"recipe": "mxfp8"}) for name in imports]
            config.training.local_batch_size, config.training.steps, config.debug.seed = 2, 2, 0
            config.activation_checkpoint = SelectiveAC.Config()
            trainer = Trainer(config)
            losses.append(losses_of(trainer))
            groups = [module.group for module in trainer.model_parts[0].modules() if isinstance(module, MXNorm)]
            assert [group and group.joins_fprop for group in groups] == [None, False] * 2, "kept one by one"
    finally:
        torch.distributed.destroy_process_group()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("setting", ["pipeline_parallel_degree", "spmd_backend"])
def test_layouts_that_an_override_cannot_do_are_refused_by_name(setting):
    config = override_with_mxtrain(model_registry("debugmodel").model)
    del config.layers[1:]
    dims = SimpleNamespace(pp_enabled=setting == "pipeline_parallel_degree", spmd_backend="full_dtensor")
    with torch.device("meta"), pytest.raises(ConfigError, match=f"^parallelism.{setting}"):
        config.build().parallelize(dims)


def _batches(dp_world_size, dp_rank, local_batch_size, **_) -> list:
    """Two batches of four sequences; every rank has its part of them in parts of so many rows."""
    rows = torch.randint(64, (2, 4, 65), generator=torch.Generator().manual_seed(0))[:, dp_rank::dp_world_size]
    positions = torch.arange(64).expand(local_batch_size, 64)
    return [
        ({"input": part[:, :-1], "positions": positions}, part[:, 1:])
        for part in rows.flatten(0, 1).split(local_batch_size)
    ]


def _check_layouts(mesh) -> None:
    use_layouts_on_a_cpu()
    os.environ["LOCAL_RANK"] = str(mesh.get_local_rank())
    torch.autograd.set_multithreading_enabled(False)  # as TorchTitan, which finds the processes joined
    losses = {}
    with TemporaryDirectory() as folder:
        for name in ("data_parallel_shard", "expert_parallel", "pipeline_parallel"):
            debug._clear_sharding_prop_cache()  # PyTorch keeps meshes of the layout before in it
            config = configured(deepseek_v3_debugmodel(), _batches, folder)
            setattr(config.parallelism, f"{name}_degree", 2)
            config.parallelism.pipeline_parallel_schedule, config.debug.seed = "1F1B", 0
            config.training.local_batch_size = 4 if name == "pipeline_parallel" else 2
            config.training.steps, config.training.mixed_precision_param = 2, "float32"
            losses[name] = losses_of(Trainer(config))
    first, *others = losses.values()
    if mesh.get_local_rank() == 1:  # which has the last stage
        assert all(other == pytest.approx(first, rel=1e-5) for other in others), losses


def test_layouts_have_the_same_losses():
    in_two_processes(_check_layouts, "cpu")


@pytest.mark.parametrize(
    "converters, tables, message",
    [
        (["mxnorms"], {}, "^model.converters = 'mxnorms' is not one of"),
        (["mxnorm"], {"training": {"steps": 3}}, "^with_mxtrain: table = 'training' is not one of: 'mxnorm'"),
        (["mxnorm"], {"mxnorm": {"q": 3}}, "^mxnorm.q is not a setting"),
        (["mxnorm"], {"mxnorm": {"recipe": "fp3"}}, "^mxnorm.recipe = 'fp3' is not one of"),
        (["mxnorm"], {"mxnorm": {"schedule": [{"from_step": 3, "norm": "rmsnorm"}]}}, "^mxnorm.schedule needs"),
        (
            ["mxnorm"],
            {"mxnorm": {"diagnostics": {"every": 3}}},
            "^mxnorm.diagnostics.every = 3 needs mxtrain's trainer",
        ),
        (["mxnorm"], {"mxnorm": {"mode": "fp8_merged"}}, "^mxnorm.diagnostics.every = 200 needs mxtrain's trainer"),
    ],
)
def test_what_it_cannot_do_is_one_line(converters, tables, message):
    with pytest.raises(ConfigError, match=message):
        with_mxtrain(model_registry("debugmodel"), converters, **tables)


@pytest.mark.parametrize(
    "setting, value",
    [
        ("spmd_backend", "full_dtensor"),
        ("pipeline_parallel_schedule", "ZBVZeroBubble"),
        ("pipeline_parallel_schedule_csv", "schedule.csv"),
    ],
)
def test_layouts_that_layers_cannot_do_are_refused_by_name(setting, value):
    parallelism = ParallelismConfig(**{"pipeline_parallel_degree": 2, setting: value})
    given = dict.fromkeys(("model", "training", "ac_config", "parallel_dims"))
    with pytest.raises(ConfigError, match=f"^parallelism.{setting} = '{value}' is not one of: '"):
        with_mxtrain(model_registry("debugmodel")).parallelize_fn(**given, parallelism=parallelism)


@pytest.mark.parametrize(
    "model, flavor, norms, experts",
    [("llama3", "debugmodel", 12, 0), ("qwen3", "debugmodel_moe", 16, 8), ("deepseek_v3", "debugmodel", 18, 5)],
)
def test_models_with_flex_attention_are_converted(model, flavor, norms, experts):
    spec = import_module(f"torchtitan.models.{model}").model_registry(flavor)
    with torch.device("meta"):
        converted = with_mxtrain(spec).model.build()
    converted.verify_module_protocol()
    count = Counter(type(module).__name__ for module in converted.modules())
    assert (count["MXNorm"], count["MXGroupedExperts"]) == (norms, experts)
