"""Exports of runs against transformers and against TorchTitan's own model, and their losses on held-out text."""

import json
import re
import shutil
import weakref
from importlib.metadata import version

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.data.store import TokenFile
from mxtrain.errors import ConfigError
from mxtrain.hugging_face import model_files
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.titan.hugging_face import export as export_module
from mxtrain.titan.hugging_face import saved_run
from mxtrain.titan.hugging_face.export import NoLoss, export, held_out_losses
from mxtrain.titan.hugging_face.saved_run import open_run
from tests.support import saved_runs, training_worker

CPU = torch.device("cpu")
SEQ_LEN = 256
MODELS = [("llama3", "small"), ("qwen3", "small"), ("qwen3", "small_tied"), ("qwen3", "small_experts")]


@pytest.fixture(autouse=True)
def flavors(monkeypatch):
    saved_runs.add_flavors(monkeypatch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each model, by name and flavor. The first one has text. They were measured while they trained."""
    base = tmp_path_factory.mktemp("runs")
    text = base / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"def main{i}(a, b):\n    return a + b * {i}\n" * 12)
    with pytest.MonkeyPatch.context() as patch:
        saved_runs.add_flavors(patch)
        return {
            (model, flavor): saved_runs.save_run(
                base / model / flavor,
                model,
                flavor,
                text=None if i else text,
                training={"dataset": "python", "seq_len": SEQ_LEN},
                mxnorm={"diagnostics": {"every": 2}},
            )
            for i, (model, flavor) in enumerate(MODELS)
        }


@pytest.fixture
def run(runs):
    return runs[MODELS[0]]


def logits(model, tokens):
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, "logits", out)


@pytest.mark.parametrize("fold_gain", [False, True])
@pytest.mark.parametrize("name", MODELS, ids="-".join)
def test_transformers_computes_what_the_trained_weights_compute_under_rmsnorm(name, fold_gain, runs, tmp_path):
    report = export(runs[name], tmp_path / "out", fold_gain=fold_gain)
    assert (report.step, report.losses) == (3, None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.float32
    ours = open_run(runs[name]).load(CPU, has_converters=False)
    tokens = torch.randint(0, saved_runs.VOCABULARY, (2, SEQ_LEN))
    expected = logits(ours, tokens)
    assert expected.std() > 0.1
    assert (logits(theirs, tokens) - expected).abs().max() < 1e-5
    gains = [w for n, w in theirs.state_dict().items() if re.search("(input|post_attention)_layernorm", n)]
    assert len(gains) == 4 and all(torch.equal(gain, torch.ones(64)) == fold_gain for gain in gains)
    assert not torch.equal(theirs.model.norm.weight, torch.ones(64))


def test_the_folder_is_complete(run, tmp_path):
    target = tmp_path / "new" / "out"
    report = export(run, target, dtype=torch.bfloat16)
    assert sorted(path.name for path in target.parent.iterdir()) == ["out"]
    names = {path.name for path in target.iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "mxtrain.json", *tokenizer}
    assert set(report.files) <= names and report.notes == ()
    weights = load_file(target / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert report.bytes == sum(weight.nbytes for weight in weights.values())
    assert transformers.AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16
    kept = json.loads((target / "mxtrain.json").read_text())
    assert (kept["run"], kept["step"], kept["dtype"], kept["loss"]) == (str(run), 3, "bfloat16", None)
    assert kept["settings"]["model"]["flavor"] == "small" and kept["versions"]["torch"] == version("torch")
    loaded = transformers.AutoTokenizer.from_pretrained(target)
    ids = loaded("def main1(a, b):")["input_ids"]
    assert loaded.decode(ids) == "def main1(a, b):"
    assert loaded.eos_token_id == transformers.GenerationConfig.from_pretrained(target).eos_token_id == 1


def test_the_losses_are_those_of_the_two_models(run, tmp_path):
    report = export(run, tmp_path / "out", loss_tokens=512, device="cpu")
    losses = report.losses
    assert losses.tokens == 512 and losses.text.startswith("files-")
    assert losses.as_trained != losses.as_exported
    assert losses.as_trained == pytest.approx(losses.as_exported, abs=0.05), "the same weights"
    assert json.loads((tmp_path / "out" / "mxtrain.json").read_text())["loss"] == {
        "as_trained": losses.as_trained,
        "as_exported": losses.as_exported,
        "tokens": 512,
        "text": losses.text,
    }
    difference = f"{losses.as_exported - losses.as_trained:+.4f}"
    assert f"{losses.as_trained:.4f} as trained (mxnorm mxfp8), " in str(report) and difference in str(report)
    assert "512 held-out tokens" in str(report)


def test_a_target_that_cannot_be_written_is_refused_before_the_losses_are_computed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "held_out_losses", lambda *arguments: pytest.fail("too late"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="^DIR = '.*file/out' cannot be written: "):
        export(run, tmp_path / "file" / "out", loss_tokens=64)


def test_without_text_and_tokenizer_the_weights_are_exported(runs, tmp_path):
    report = export(runs["qwen3", "small"], tmp_path / "out", loss_tokens=64)
    assert report.losses is None and (tmp_path / "out" / "model.safetensors").is_file()
    assert "no loss is computed: data.json, which names the run's text, cannot be read" in str(report)
    assert "the export has no tokenizer: " in str(report)


def test_the_newest_complete_step_or_the_one_asked_for(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    saved_runs.save_weights(copy / "checkpoint" / "step-10", saved_runs.random_weights("llama3", "small", seed=1))
    (copy / "checkpoint" / "step-20").mkdir()  # what a kill leaves
    assert export(copy, tmp_path / "newest").step == 10
    assert export(copy, tmp_path / "asked", step=3).step == 3
    newest, asked = (load_file(tmp_path / name / "model.safetensors")["lm_head.weight"] for name in ("newest", "asked"))
    assert not torch.equal(newest, asked)


def test_weights_are_held_one_at_a_time(run, tmp_path, monkeypatch):
    """Several small files: whatever is read is gone, but for what waits for its file to be full."""
    live, peak = set(), [0]
    read = saved_run.SavedWeights.__getitem__

    def watched(weights, fqn):
        weight = read(weights, fqn)
        live.add((fqn, weight.nbytes))
        weakref.finalize(weight.untyped_storage(), live.discard, (fqn, weight.nbytes))
        peak[0] = max(peak[0], sum(size for _, size in live))
        return weight

    limit = 100_000
    monkeypatch.setattr(saved_run.SavedWeights, "__getitem__", watched)
    monkeypatch.setattr(model_files, "SHARD_BYTES", limit)
    report = export(run, tmp_path / "out")
    largest = saved_runs.VOCABULARY * 64 * 4
    assert report.bytes > 4 * limit and len(report.files) > 5
    assert largest < peak[0] <= limit + 2 * largest


def copy_of(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def without_checkpoints(run, tmp_path):
    shutil.rmtree(copy_of(run, tmp_path) / "checkpoint")


def with_setting(name, value):
    def change(run, tmp_path):
        file = copy_of(run, tmp_path) / "config.toml"
        text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {json.dumps(value)}", file.read_text())
        file.write_text(text)
        saved_runs.add_manifest(tmp_path / "run" / "checkpoint" / "step-3")

    return change


def with_weights(change):
    def make(run, tmp_path):
        weights = saved_runs.random_weights("llama3", "small")
        change(weights)
        folder = copy_of(run, tmp_path) / "checkpoint" / "step-3"
        shutil.rmtree(folder)
        saved_runs.save_weights(folder, weights)

    return make


def damaged_list(run, tmp_path):
    (copy_of(run, tmp_path) / "checkpoint" / "step-3" / ".metadata").write_bytes(b"nothing")


def of_deepseek(run, tmp_path):
    with_setting("name", "deepseek_v3")(run, tmp_path)
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace('"small"', '"debugmodel"'))
    saved_runs.add_manifest(tmp_path / "run" / "checkpoint" / "step-3")


def existing_target(run, tmp_path):
    copy_of(run, tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")


BAD = {
    "no folder": (lambda run, tmp_path: None, {}, "RUN = '{tmp}/run' is no run: config.toml is missing"),
    "no checkpoints": (without_checkpoints, {}, "RUN = '{tmp}/run' has no whole checkpoint in {tmp}/run/checkpoint"),
    "another step": (copy_of, {"step": 4}, "--step = 4 is not among the steps in {tmp}/run/checkpoint: 3"),
    "deepseek": (
        of_deepseek,
        {},
        "RUN = '{tmp}/run': model.name = 'deepseek_v3' has no Hugging Face form here; supported are: llama3, qwen3",
    ),
    "unknown setting": (
        lambda run, tmp_path: (copy_of(run, tmp_path) / "config.toml").write_text("[model]\nflavour = 1\n"),
        {},
        "model.flavour is not a setting; the closest is model.flavor",
    ),
    "format": (copy_of, {"format": "gguf"}, "--format = 'gguf' is not one of: 'hf', 'mxfp8', 'nvfp4'"),
    "no such format": (
        copy_of,
        {"format": "nvfp4"},
        "--format = 'nvfp4': fprop casts no weight of this run to nvfp4 at this step; its linears have mxfp8",
    ),
    "folded twice": (
        copy_of,
        {"format": "mxfp8", "fold_gain": True},
        "--fold-gain does not go with --format = 'mxfp8'",
    ),
    "target exists": (existing_target, {}, "DIR = '{tmp}/out' exists; choose another folder, or remove it"),
    "missing weight": (
        with_weights(lambda weights: weights.pop("norm.weight")),
        {},
        "RUN: the checkpoint {tmp}/run/checkpoint/step-3 cannot be used: norm.weight is missing",
    ),
    "wrong shape": (
        with_weights(lambda weights: weights.update({"norm.weight": torch.ones(65)})),
        {},
        "RUN: the checkpoint {tmp}/run/checkpoint/step-3 cannot be used: norm.weight has shape [65], and [64] by",
    ),
    "damaged list": (damaged_list, {}, "RUN = '{tmp}/run' has no whole checkpoint in {tmp}/run/checkpoint; step-3: "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line_and_writes_nothing(case, run, tmp_path):
    prepare, arguments, message = BAD[case]
    prepare(run, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as error:
        export(tmp_path / "run", tmp_path / "out", **arguments)
    assert str(error.value).startswith(message.format(tmp=tmp_path))
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_experts_with_a_bias_have_no_counterpart(runs, tmp_path):
    weights = saved_runs.random_weights("qwen3", "small_experts")
    weights["layers.1.moe.expert_bias"] += 0.1
    folder = shutil.copytree(runs["qwen3", "small_experts"], tmp_path / "run")
    saved_runs.save_weights(folder / "checkpoint" / "step-4", weights)
    with pytest.raises(ConfigError, match="layers.1.moe.expert_bias is not zero, and transformers' Qwen3-MoE has no"):
        export(folder, tmp_path / "out")
    assert export(folder, tmp_path / "out", step=3).step == 3


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


@pytest.fixture
def text_run(tmp_path):
    """A run of its own with short sequences and a text."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i}.txt").write_text(f"x{i} = {i} + {i}\nprint(x{i})\n" * 20)
    return saved_runs.save_run(tmp_path / "run", "llama3", "small", text=text)


def tokens_of(folder):
    kept = json.loads((folder / "data.json").read_text())
    return np.fromfile(f"{kept['cache']}/{kept['prepared']}/validation.bin", "<u2").astype(np.int64)


def test_losses_are_the_mean_over_the_tokens_of_both_models(text_run):
    saved = open_run(text_run)
    ids = torch.from_numpy(tokens_of(text_run))
    count = len(ids) // 33
    assert count > 3
    rows = torch.stack([ids[i * 33 : (i + 1) * 33] for i in range(count)])
    expected = []
    for has_converters in (True, False):
        model = saved.load(CPU, has_converters)
        assert has_converters == any(isinstance(module, MXNorm) for module in model.modules())
        with torch.no_grad():
            expected.append(F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item())
    losses = held_out_losses(saved, 10**9, saved.weights.__getitem__, CPU)
    assert losses.tokens == 32 * count
    assert losses.as_trained == pytest.approx(expected[0], rel=1e-5)
    assert losses.as_exported == pytest.approx(expected[1], rel=1e-5)
    assert expected[0] != expected[1]


def test_the_exported_loss_has_the_exported_weights(text_run):
    saved = open_run(text_run)

    def rounded(fqn):
        return saved.weights[fqn].bfloat16()

    fp32, bf16 = (held_out_losses(saved, 320, exported, CPU) for exported in (saved.weights.__getitem__, rounded))
    assert fp32.as_trained == bf16.as_trained and fp32.as_exported != bf16.as_exported
    assert fp32.as_exported == pytest.approx(bf16.as_exported, abs=0.02)


def test_sequences_are_spread_over_the_text(tmp_path):
    ids = np.arange(1000, dtype="<u2")
    ids.tofile(tmp_path / "a.bin")
    batches, count = export_module._batches(TokenFile(tmp_path / "a.bin", "<u2", 1000), tokens=45, seq_len=9)
    rows = torch.cat(list(batches()))
    assert count == 45 and rows.shape == (5, 10) and rows.dtype == torch.int64
    assert rows[:, 0].tolist() == [0, 200, 400, 600, 800]


@pytest.mark.parametrize(
    "tokens, seq_len, expected", [(10**6, 5000, (1, 1000)), (7, 50, (1, 8)), (10**6, 99, (10, 100))]
)
def test_no_text_is_too_short_for_a_sequence(tokens, seq_len, expected, tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "a.bin")
    batches, count = export_module._batches(TokenFile(tmp_path / "a.bin", "<u2", 1000), tokens, seq_len)
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


def test_a_text_that_is_not_there_is_named(text_run):
    file = text_run / "data.json"
    before = file.read_text()
    changes = {streamed: "was streamed", other_text: "its hash differs", gone: "gone or damaged", damaged: "damaged"}
    for change, reason in changes.items():
        kept = json.loads(before)
        change(kept, text_run)
        file.write_text(json.dumps(kept))
        with pytest.raises(NoLoss, match=reason):
            held_out_losses(open_run(text_run), 64, open_run(text_run).weights.__getitem__, CPU)


def test_converters_of_titan_are_named(text_run, monkeypatch):
    saved = open_run(text_run)
    monkeypatch.setattr(saved.job_config.model, "converters", ["quantize.linear.float8"])
    with pytest.raises(NoLoss, match="it would need TorchTitan's converter 'quantize.linear.float8', which runs in"):
        held_out_losses(saved, 64, saved.weights.__getitem__, CPU)
    saved.build(has_converters=True)  # an export of the weights works


def test_nothing_held_out_is_named(text_run, tmp_path):
    other = saved_runs.save_run(
        tmp_path / "other", "llama3", "small", text=tmp_path / "text", data={"validation_share": 0.0}
    )
    with pytest.raises(NoLoss, match="is held out: it is short, or data.validation_share is 0"):
        held_out_losses(open_run(other), 64, open_run(other).weights.__getitem__, CPU)
