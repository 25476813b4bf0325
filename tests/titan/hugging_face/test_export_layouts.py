"""Exports of checkpoints that several processes wrote."""

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.titan.hugging_face.export import export
from mxtrain.titan.hugging_face.saved_run import open_run
from tests.support import training_worker


@pytest.fixture
def tiny_models():
    training_worker.add_tiny_models()
    yield
    for name in ("llama3", "llama4", "deepseek_v3", "qwen3"):
        del get_train_spec(name).model_args["tiny"]


@pytest.mark.parametrize("name", ["fsdp", "tp"])
def test_a_checkpoint_of_several_processes_is_exported_whole(several, name, tiny_models, tmp_path):
    """Every tensor has the bits of PyTorch's own conversion of the checkpoint, under TorchTitan's own names."""
    folder = several[name].folder
    assert export(folder, tmp_path / "out").step == 2
    dcp_to_torch_save(folder / "checkpoint" / "step-2", tmp_path / "weights.pt")
    run = open_run(folder)
    states = torch.load(tmp_path / "weights.pt", weights_only=False)
    weights = {fqn: states[fqn] for fqn in run.build().state_dict()}
    expected = get_train_spec("llama3").state_dict_adapter(run.args, None).to_hf(weights)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[tensor], expected[tensor]) for tensor in expected)
