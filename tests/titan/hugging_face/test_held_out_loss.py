import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mxtrain.data.store import TokenFile
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.titan.hugging_face import held_out_loss
from mxtrain.titan.hugging_face.held_out_loss import NoLoss, held_out_losses, load_model
from mxtrain.titan.hugging_face.saved_run import open_run
from tests.support import saved_runs

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path, monkeypatch):
    saved_runs.add_flavors(monkeypatch)
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i}.txt").write_text(f"x{i} = {i} + {i}\nprint(x{i})\n" * 20)
    return saved_runs.save_run(tmp_path / "run", "llama3", "small", text=text)


def tokens_of(folder):
    kept = json.loads((folder / "data.json").read_text())
    return np.fromfile(f"{kept['cache']}/{kept['prepared']}/validation.bin", "<u2").astype(np.int64)


def test_losses_are_the_mean_over_the_tokens_of_both_models(run):
    saved = open_run(run)
    ids = torch.from_numpy(tokens_of(run))
    count = len(ids) // 33
    assert count > 3
    rows = torch.stack([ids[i * 33 : (i + 1) * 33] for i in range(count)])
    expected = []
    for has_converters in (True, False):
        model = load_model(saved, CPU, has_converters)
        assert has_converters == any(isinstance(module, MXNorm) for module in model.modules())
        with torch.no_grad():
            expected.append(F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item())
    losses = held_out_losses(saved, 10**9, saved.weights.__getitem__, CPU)
    assert losses.tokens == 32 * count
    assert losses.as_trained == pytest.approx(expected[0], rel=1e-5)
    assert losses.as_exported == pytest.approx(expected[1], rel=1e-5)
    assert expected[0] != expected[1]


def test_the_exported_loss_has_the_exported_weights(run):
    saved = open_run(run)

    def rounded(fqn):
        return saved.weights[fqn].bfloat16()

    fp32, bf16 = (held_out_losses(saved, 320, exported, CPU) for exported in (saved.weights.__getitem__, rounded))
    assert fp32.as_trained == bf16.as_trained and fp32.as_exported != bf16.as_exported
    assert fp32.as_exported == pytest.approx(bf16.as_exported, abs=0.02)


def test_sequences_are_spread_over_the_text(tmp_path):
    ids = np.arange(1000, dtype="<u2")
    ids.tofile(tmp_path / "a.bin")
    batches, count = held_out_loss._batches(TokenFile(tmp_path / "a.bin", "<u2", 1000), tokens=45, seq_len=9)
    rows = torch.cat(list(batches()))
    assert count == 45 and rows.shape == (5, 10) and rows.dtype == torch.int64
    assert rows[:, 0].tolist() == [0, 200, 400, 600, 800]


@pytest.mark.parametrize(
    "tokens, seq_len, expected", [(10**6, 5000, (1, 1000)), (7, 50, (1, 8)), (10**6, 99, (10, 100))]
)
def test_no_text_is_too_short_for_a_sequence(tokens, seq_len, expected, tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "a.bin")
    batches, count = held_out_loss._batches(TokenFile(tmp_path / "a.bin", "<u2", 1000), tokens, seq_len)
    rows = torch.cat(list(batches()))
    assert rows.shape == expected and count == rows[:, 1:].numel()


def streamed(kept, folder):
    kept["prepared"] = None


def other_text(kept, folder):
    kept["identity"]["validation"] = "0" * 64


def gone(kept, folder):
    kept["cache"] = "/no/such"


def damaged(kept, folder):
    (folder.parent / "cache" / kept["prepared"] / "validation.bin").write_bytes(b"")


@pytest.mark.parametrize(
    "change, reason",
    {streamed: "was streamed", other_text: "its hash differs", gone: "is gone or dam", damaged: "gone or dam"}.items(),
)
def test_a_text_that_is_not_there_is_named(change, reason, run):
    file = run / "data.json"
    kept = json.loads(file.read_text())
    change(kept, run)
    file.write_text(json.dumps(kept))
    with pytest.raises(NoLoss, match=reason):
        held_out_losses(open_run(run), 64, open_run(run).weights.__getitem__, CPU)


def test_converters_of_titan_are_named(run, monkeypatch):
    saved = open_run(run)
    monkeypatch.setattr(saved.job_config.model, "converters", ["quantize.linear.float8"])
    with pytest.raises(NoLoss, match="it would need TorchTitan's converter 'quantize.linear.float8', which runs in"):
        held_out_losses(saved, 64, saved.weights.__getitem__, CPU)
    held_out_loss.convert(saved, saved.build())  # an export of the weights works


def test_nothing_held_out_is_named(run, tmp_path):
    other = saved_runs.save_run(
        tmp_path / "other", "llama3", "small", text=tmp_path / "text", data={"validation_share": 0.0}
    )
    with pytest.raises(NoLoss, match="is held out: it is short, or data.validation_share is 0"):
        held_out_losses(open_run(other), 64, open_run(other).weights.__getitem__, CPU)


def test_a_tied_model_is_loaded_tied(tmp_path, monkeypatch):
    saved_runs.add_flavors(monkeypatch)
    run = saved_runs.save_run(tmp_path / "tied", "qwen3", "small_tied")
    model = load_model(open_run(run), CPU, has_converters=False)
    assert model.output.weight is model.tok_embeddings.weight
    assert torch.equal(model.output.weight, saved_runs.random_weights("qwen3", "small_tied")["output.weight"])
