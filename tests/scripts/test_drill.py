"""The fault drill: a small one on real runs, and that it notices every kind of harm."""

import json
from pathlib import Path

import drill
import judge
import moments
import pytest
import torch
import torch.distributed.checkpoint as dcp
from moments import Saved
from victim import write_config

from mxtrain.checkpoints.folder import Manifest, write_manifest
from mxtrain.files import hash_file
from mxtrain.settings.read import read_settings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("on_gpus", [False, True])
def test_runs_on_gpus_are_compiled_and_repeat_themselves(on_gpus, tmp_path):
    settings = read_settings([f"--job.config_file={write_config(tmp_path, on_gpus)}"])
    assert settings["debug.deterministic"] == settings["compile.enable"] == on_gpus
    assert settings["training.mixed_precision_param"] == ("bfloat16" if on_gpus else "float32")


@pytest.mark.sweep
def test_a_kill_after_a_save_does_no_harm(tmp_path, capsys):
    output = tmp_path / "drill.json"
    options = ["--kills", "1", "--steps", "6", "--interval", "2", "--moments", "save ends"]
    status = drill.main([*options, "--output", str(output)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    result = json.loads(output.read_text())
    (kill,) = result["kills"]
    assert kill["moment"] == "save ends" and kill["step"] >= 2 and kill["lost"] <= 3
    assert result["finished"] == [[]]
    assert printed.splitlines()[-1] == "1 runs reached their end; 1 have the losses and gradient norms of the reference"


def test_what_a_folder_holds(tmp_path):
    assert moments.look(tmp_path / "none") == Saved({})
    for name in ("step-3/.metadata", "step-3/a", "step-6/a", ".saving/step-9/a", "set_aside/step-12/a", "other/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert moments.look(tmp_path) == Saved({3: 2}, frozenset({"step-6", ".saving", ".saving/step-9"}), 1)


NONE, THREE, TWO = Saved({}), Saved({3: 5}), Saved({3: 5, 6: 5})
SAVING = Saved({3: 5}, frozenset({".saving", ".saving/step-6"}))


@pytest.mark.parametrize(
    "before, now, come",
    [
        (NONE, Saved({}, frozenset({"step-3"})), {"first save", "save begins", "save", "upload"}),
        (THREE, SAVING, {"save begins", "save", "upload"}),
        (SAVING, SAVING, set()),
        (SAVING, TWO, {"save ends"}),
        (TWO, Saved({3: 4, 6: 5}), {"purge", "overwrite"}),
        (TWO, Saved({6: 5}), {"purge", "overwrite"}),
        (TWO, Saved({3: 5, 6: 5}, set_aside=1), {"overwrite"}),
    ],
)
def test_moments_are_recognised_by_what_changes(before, now, come):
    found = [moment for moment in moments.moments(is_async=True, can_export=True) if moment.has_come]
    assert {moment.name for moment in found if moment.has_come(before, now)} == come


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
