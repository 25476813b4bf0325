"""Models of TorchTitan 0.3's own registry, converted for its own trainer."""

import os
from collections import Counter
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from mxtrain import ConfigError, MXNorm
from mxtrain.titan import with_mxtrain
from mxtrain.titan.v03.config import built

ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


@patch.dict(os.environ, ONE_PROCESS)  # restores what TorchTitan sets, too
def test_titans_trainer_trains_a_converted_model(tmp_path, monkeypatch):
    config = llama3_debugmodel()
    spec, config.model_spec = config.model_spec, with_mxtrain(config.model_spec, mxnorm={"p": 1, "recipe": "nvfp4"})
    assert config.model_spec.model is not spec.model
    for layer in config.model_spec.model.layers:  # a CPU has no flex attention
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    del config.model_spec.model.layers[2:]
    tokens = torch.arange(65)[None] % 7
    batch = {"input": tokens[:, :-1], "positions": torch.arange(64)[None]}, tokens[:, 1:]
    config.dataloader = built(BaseDataLoader.Config, lambda **_: [batch] * 8)
    config.tokenizer = built(BaseTokenizer.Config, lambda **_: None)
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 64, 1, 8
    config.training.disable_cuda_graphs, config.dump_folder = True, str(tmp_path)
    config.activation_checkpoint = None
    losses = []
    try:
        trainer = Trainer(config)
        monkeypatch.setattr(trainer.metrics_processor, "log", lambda step, loss, *_, **__: losses.append(loss))
        trainer.train()
        norm = trainer.model_parts[0].layers["0"].attention_norm
        assert isinstance(norm, MXNorm) and "p=1" in repr(norm) and "nvfp4" in repr(norm)
        assert losses[-1] < losses[0] - 1
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "converters, tables, message",
    [
        (["mxnorms"], {}, "^model.converters = 'mxnorms' is not one of"),
        (["mxnorm"], {"training": {"steps": 3}}, "^with_mxtrain: table = 'training' is not one of: 'mxnorm'"),
        (["mxnorm"], {"mxnorm": {"q": 3}}, "^mxnorm.q is not a setting"),
        (["mxnorm"], {"mxnorm": {"recipe": "fp3"}}, "^mxnorm.recipe = 'fp3' is not one of"),
        (["mxnorm"], {"mxnorm": {"schedule": [{"from_step": 3, "p": 1}]}}, "^mxnorm.schedule and mxnorm.guard need"),
        (
            ["mxnorm"],
            {"mxnorm": {"diagnostics": {"every": 3}}},
            "^mxnorm.diagnostics.every = 3 needs mxtrain's trainer",
        ),
    ],
)
def test_what_it_cannot_do_is_one_line(converters, tables, message):
    with pytest.raises(ConfigError, match=message):
        with_mxtrain(model_registry("debugmodel"), converters, **tables)


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
