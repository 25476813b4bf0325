"""Runs opened, and their exports against transformers and TorchTitan's own model."""

import json
import re
import shutil
import weakref
from importlib.metadata import version

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mxtrain.data.tokenizer import load_tokenizer
from mxtrain.errors import ConfigError
from mxtrain.hugging_face import export as export_files
from mxtrain.hugging_face.checkpoint import SavedWeights
from mxtrain.hugging_face.text import load
from mxtrain.titan.hugging_face import export as export_module
from mxtrain.titan.hugging_face.export import export, open_run
from mxtrain.titan.releases import RELEASE, engine
from tests.support import saved_runs, training_worker
from tests.support.hostile_pickles import NAME, put_code_into_index

MODELS = [
    ("llama3", "small"), ("qwen3", "small_tied"), ("qwen3", "small_experts"), ("deepseek_v3", "small"),
    ("deepseek_v3", "small_plain"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def flavors(monkeypatch):
    saved_runs.add_flavors(monkeypatch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each model, by name and flavor. The first one has text. They were measured while they trained."""
    base = tmp_path_factory.mktemp("runs")
    text = base / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i}.txt").write_text(f"def main{i}(a, b):\n    return a + b * {i}\n" * 12)
    with pytest.MonkeyPatch.context() as patch:
        saved_runs.add_flavors(patch)
        return {
            name: saved_runs.save_run(
                base / "-".join(name), *name, text=None if i else text, mxnorm={"diagnostics": {"every": 2}}
            )
            for i, name in enumerate(MODELS)
        }


@pytest.fixture
def run(runs):
    return runs[MODELS[0]]


@pytest.fixture
def own(run, tmp_path):
    """A copy of the run, to be changed."""
    return shutil.copytree(run, tmp_path / "run")


def logits(model, tokens):
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, "logits", out)


def report_of(target):
    return json.loads((target / "mxtrain.json").read_text())


@pytest.mark.parametrize(
    ("name", "fold_gain"),
    [*((name, False) for name in MODELS), *((name, True) for name in MODELS if name[1] in ("small", "small_experts"))],
)
def test_transformers_computes_what_the_trained_weights_compute_under_rmsnorm(name, fold_gain, runs, tmp_path):
    step, lines = export(runs[name], tmp_path / "out", fold_gain=fold_gain)
    assert step == 3 and ("has no tokenizer" in lines) == (name != MODELS[0])
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert theirs.dtype == torch.float32 and not any(info[kind] for kind in ("missing_keys", "unexpected_keys"))
    ours = saved_runs.load(open_run(runs[name]), has_converters=False)
    tokens = torch.randint(0, saved_runs.VOCABULARY, (2, 32))
    expected = logits(ours, tokens)
    assert expected.std() > 0.1
    assert (logits(theirs, tokens) - expected).abs().max() < 1e-5
    gains = [w for n, w in theirs.state_dict().items() if re.search("(input|post_attention)_layernorm", n)]
    assert len(gains) == 2 * theirs.config.num_hidden_layers
    assert all(torch.equal(gain, torch.ones(64)) == fold_gain for gain in gains)
    assert not torch.equal(theirs.model.norm.weight, torch.ones(64))


def test_the_folder_is_complete(run, tmp_path):
    target = tmp_path / "new" / "out"
    export(run, target, dtype=torch.bfloat16)
    assert sorted(path.name for path in target.parent.iterdir()) == ["out"]
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    files = {"model.safetensors", "config.json", "generation_config.json", "mxtrain.json", *tokenizer}
    assert {path.name for path in target.iterdir()} == files
    weights = load_file(target / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert transformers.AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16
    kept = report_of(target)
    assert (kept["run"], kept["step"], kept["dtype"], kept["notes"]) == (str(run), 3, "bfloat16", [])
    assert kept["settings"]["model"]["flavor"] == "small" and kept["versions"]["torch"] == version("torch")
    loaded = transformers.AutoTokenizer.from_pretrained(target)
    ids = loaded("def main1(a, b):")["input_ids"]
    assert loaded.decode(ids) == "def main1(a, b):"
    assert loaded.eos_token_id == transformers.GenerationConfig.from_pretrained(target).eos_token_id == 1


def of_class(name, **more):
    def change(tokenizer):
        file = tokenizer / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name, **more}))

    return change


def older_file(tokenizer):
    (tokenizer / "tokenizer_config.json").rename(tokenizer / "special_tokens_map.json")


def begins_with_a_space(tokenizer):
    file = tokenizer / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    file.write_text(json.dumps(content))


TOKENIZERS = {
    "own class": of_class("Qwen2Tokenizer", auto_map={"AutoTokenizer": [None, "code.Own"]}),
    "no class": older_file,
    "prefix": begins_with_a_space,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_export_cuts_text_as_training_did(kind, run, runs, tmp_path):
    """Beside Qwen3's config.json transformers would cut digits apart, and read no normalizer."""
    folder = shutil.copytree(runs["qwen3", "small_tied"], tmp_path / "run")
    TOKENIZERS[kind](shutil.copytree(run / "tokenizer", folder / "tokenizer"))
    _, lines = export(folder, tmp_path / "out")
    trained, text = load_tokenizer(folder / "tokenizer"), "def f1234(x):\n\n    return x  # I'LL don't \r\n e\u0301"
    for loaded in (transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), load(tmp_path / "out")[1]):
        assert loaded(text, add_special_tokens=False)["input_ids"] == trained.encoder.encode(text).ids
        assert (loaded.bos_token_id, loaded.eos_token_id) == (trained.bos_id, trained.eos_id) == (0, 1)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    # transformers 4 would turn a prefix of tokenizer.json off.
    assert config.get("add_prefix_space", False) == (kind == "prefix") and "auto_map" not in config
    assert "note" not in lines


def test_the_newest_complete_step_or_the_one_asked_for(own, tmp_path):
    """A checkpoint of bf16 is loaded into fp32."""
    newer = {fqn: w.bfloat16() for fqn, w in saved_runs.random_weights("llama3", "small", seed=1).items()}
    saved_runs.save_weights(own / "checkpoint" / "step-10", newer)
    (own / "checkpoint" / "step-20").mkdir()  # what a kill leaves
    saved = open_run(own)
    assert saved.step == 10 and open_run(own, 3).step == 3
    assert saved.weights["norm.weight"].dtype == torch.bfloat16
    assert torch.equal(saved_runs.load(saved, False).norm.weight, newer["norm.weight"].float())


def test_weights_are_held_one_at_a_time(run, tmp_path, monkeypatch):
    """Several small files: whatever is read is gone, but for what waits for its file to be full."""
    live, peak = set(), [0]
    read = SavedWeights.__getitem__

    def watched(weights, fqn):
        weight = read(weights, fqn)
        live.add((fqn, weight.nbytes))
        weakref.finalize(weight.untyped_storage(), live.discard, (fqn, weight.nbytes))
        peak[0] = max(peak[0], sum(size for _, size in live))
        return weight

    limit = 100_000
    monkeypatch.setattr(SavedWeights, "__getitem__", watched)
    monkeypatch.setattr(export_files, "SHARD_BYTES", limit)
    export(run, tmp_path / "out")
    files = list((tmp_path / "out").glob("*.safetensors"))
    largest = saved_runs.VOCABULARY * 64 * 4
    assert len(files) > 4 and sum(file.stat().st_size for file in files) > 4 * limit
    assert largest < peak[0] <= limit + 2 * largest


def with_weights(change):
    def make(run):
        weights = saved_runs.random_weights("llama3", "small")
        change(weights)
        shutil.rmtree(run / "checkpoint" / "step-3")
        saved_runs.save_weights(run / "checkpoint" / "step-3", weights)

    return make


def of_model(name, flavor):
    def change(run):
        config = (run / "config.toml").read_text().replace("llama3", name).replace('"small"', f'"{flavor}"')
        (run / "config.toml").write_text(config)
        saved_runs.add_manifest(run / "checkpoint" / "step-3")

    return change


def in_distcp(change):
    return lambda run: change(run / "checkpoint" / "step-3" / "__0_0.distcp")


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGED = "RUN: the checkpoint {run}/checkpoint/step-3 cannot be used: "
NONE_IS_WHOLE = "checkpoint.folder: {run}/checkpoint holds no whole checkpoint"
BAD = {
    "no folder": (shutil.rmtree, {}, "RUN = '{run}' does not exist; "),
    "no checkpoints": (
        lambda run: shutil.rmtree(run / "checkpoint"),
        {},
        "RUN = '{run}' has no whole checkpoint in {run}",
    ),
    "another step": (
        lambda run: None,
        {"step": 4},
        "--step = 4 is not among the steps in {run}/checkpoint; choose one of 3",
    ),
    "softmax": (
        of_model("deepseek_v3", "debugmodel"),
        {},
        "RUN = '{run}': a deepseek_v3 with score_func = 'softmax', norm_eps = 1e-05 has no counterpart in transformers",
    ),
    "format": (
        lambda run: None,
        {"format": "gguf"},
        "--format = 'gguf' is not one of: 'hf', 'mxfp8', 'nvfp4', 'mx",
    ),
    "no such format": (
        lambda run: None,
        {"format": "nvfp4"},
        "--format = 'nvfp4': fprop casts no weight to",
    ),
    "wrong shape": (
        with_weights(lambda weights: weights.update({"norm.weight": torch.ones(65)})),
        {},
        f"{DAMAGED}norm.weight has shape [65], but its settings make it [64]",
    ),
    "damaged list": (
        lambda run: (run / "checkpoint" / "step-3" / ".metadata").write_bytes(b"nothing"),
        {},
        f"{NONE_IS_WHOLE} (step-3: ",
    ),
    "missing file": (in_distcp(lambda file: file.unlink()), {}, f"{NONE_IS_WHOLE} (step-3: __0_0.distcp is missing"),
    "one bit": (in_distcp(flip), {}, f"{DAMAGED}__0_0.distcp has other content than was saved"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line_and_writes_nothing(case, own, tmp_path):
    prepare, arguments, message = BAD[case]
    prepare(own)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as error:
        export(own, tmp_path / "out", **arguments)
    assert str(error.value).startswith(message.format(run=own))
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_no_code_in_a_checkpoint_is_run(own, tmp_path):
    put_code_into_index(own / "checkpoint" / "step-3", tmp_path / "mark")
    with pytest.raises(ConfigError, match=rf"\.metadata cannot be loaded: it names {NAME}, and"):
        open_run(own)
    assert not (tmp_path / "mark").exists()


def test_the_second_of_two_tied_weights_may_be_missing(runs, tmp_path):
    run = shutil.copytree(runs["qwen3", "small_tied"], tmp_path / "run")
    weights = saved_runs.random_weights("qwen3", "small_tied")
    del weights["output.weight"]
    saved_runs.save_weights(run / "checkpoint" / "step-4", weights)
    export(run, tmp_path / "out")
    model = saved_runs.load(open_run(run), has_converters=False)
    head = saved_runs.head_of(model)
    assert head.weight is model.tok_embeddings.weight
    assert torch.equal(head.weight, weights["tok_embeddings.weight"])


@pytest.mark.parametrize(
    "processes, precision, expected",
    [(1, "bfloat16", "float32"), (2, "bfloat16", "bfloat16"), (2, "float32", "float32")],
)
def test_the_dtype_of_the_weights_in_the_forward(processes, precision, expected, own):
    """One process keeps fp32 weights, and rounds activations; FSDP rounds the weights that it gathers."""
    config, text = own / "config.toml", (own / "config.toml").read_text()
    config.write_text(text.replace("[training]", f'[training]\nmixed_precision_param = "{precision}"'))
    saved_runs.add_manifest(own / "checkpoint" / "step-3", processes)
    assert export_module._trained(open_run(own), "RUN").weight_dtype == getattr(torch, expected)


def test_settings_and_defaults_are_those_of_the_checkpoint(own):
    """The run resumed with another p and has saved nothing since; this version has other defaults than the run had."""
    config, checkpoint = own / "config.toml", own / "checkpoint" / "step-3"
    text = config.read_text()
    config.write_text(text.replace("[mxnorm.diag", "[mxnorm]\np = 1\n[mxnorm.diag"))
    assert open_run(own).settings.values.mxnorm.p == 2
    config.write_text(text.replace("[mxnorm.diag", '[mxnorm]\nmode = "native"\n[mxnorm.diag'))
    defaults = {"mxnorm.p": 1, "training.seq_len": 64, "mxnorm.recipe": "mxfp8", "training.steps": None, "gone.by": 1}
    saved_runs.add_manifest(checkpoint, defaults=defaults)
    job_config = open_run(own).settings.values
    assert (job_config.mxnorm.p, job_config.training.seq_len, job_config.mxnorm.recipe) == (1, 32, "mxfp8")
    assert job_config.mxnorm.mode == "auto", "this machine may lack the other"


@pytest.fixture
def tiny_models():
    training_worker.add_tiny_models()
    yield
    for name in ("llama3", "deepseek_v3", "qwen3", *(["llama4"] if RELEASE == "v02" else [])):
        del saved_runs.flavors_of(name)["tiny"]


def test_a_checkpoint_of_several_processes_is_exported_whole(several, tiny_models, tmp_path):
    """Every tensor has the bits of PyTorch's own conversion of the checkpoint, under TorchTitan's own names."""
    folder = several["tp"].folder
    assert export(folder, tmp_path / "out")[0] == 2
    dcp_to_torch_save(folder / "checkpoint" / "step-2", tmp_path / "weights.pt")
    run = open_run(folder)
    states = torch.load(tmp_path / "weights.pt", weights_only=False)
    weights = {name: states[engine().saved_name(name)] for name in run.model.on_meta().state_dict()}
    expected = run.model.adapter().to_hf(weights)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[tensor], expected[tensor]) for tensor in expected)
