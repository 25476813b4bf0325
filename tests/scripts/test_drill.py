"""The fault drill notices every kind of harm."""

import json

import judge
import moments
import pytest
import torch
import torch.distributed.checkpoint as dcp

from mxtrain.checkpoints.folder import Manifest, write_manifest
from mxtrain.files import hash_file


def row(step: int, loss: float) -> str:
    return json.dumps({"step": step, "loss": loss, "grad_norm": 1.0}) + "\n"


def test_a_loss_that_differs_in_its_last_bit_is_noticed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(row(1, 0.1) + row(2, 0.30000000000000004) + '{"step": 3, "lo')
    assert judge.curve(tmp_path) == {1: (0.1, 1.0), 2: (0.30000000000000004, 1.0)}
    assert judge.differing(tmp_path, {1: (0.1, 1.0), 2: (0.3, 1.0)}) == [2]
    assert judge.differing(tmp_path, judge.curve(tmp_path)) == []


@pytest.fixture
def checkpoints(tmp_path):
    """Two checkpoints, the second one with a manifest."""
    for step in (3, 6):
        dcp.save({"model.weight": torch.ones(64), "step": step}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    files = {path.name: hash_file(path) for path in (tmp_path / "step-6").iterdir()}
    write_manifest(tmp_path / "step-6", Manifest(step=6, holds_trainer=True, files=files))
    return tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_checkpoints_are_noticed(checkpoints):
    saved = moments.look(checkpoints)
    assert saved.newest == 6 and judge.damaged(checkpoints, saved) == {}
    (data,) = (checkpoints / "step-6").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    for path in (checkpoints / "step-3").glob("*.distcp"):
        path.unlink()
    found = judge.damaged(checkpoints, saved)
    assert found.keys() == {"step-3", "step-6"}
    assert found["step-6"] == f"step-6: {data.name} has other content than was saved"
