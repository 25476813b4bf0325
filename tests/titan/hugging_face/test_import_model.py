"""Models of transformers as runs, and back."""

import copy
import json
import shutil
from importlib.metadata import version

import pytest
import tomli
import torch
import transformers
from safetensors.torch import load_file, save_file

from mxtrain.checkpoints.folder import check_sizes, read_manifest
from mxtrain.checkpoints.start import find_start
from mxtrain.checkpoints.storage import read_index
from mxtrain.data.config import DataConfig
from mxtrain.data.documents import LocalFiles
from mxtrain.data.tokenizer import copy_tokenizer, train_tokenizer
from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import REPORT_FILE, read_shape, require_computed_alike
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.read import read_settings
from mxtrain.settings.resume import resolved
from mxtrain.titan.hugging_face.export import export, open_run
from mxtrain.titan.hugging_face.import_model import import_model
from mxtrain.titan.hugging_face.models import find_model
from mxtrain.titan.releases import engine
from mxtrain.titan.run_start import write_resolved_config
from tests.support import saved_runs

LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
QWEN = dict(SIZES, head_dim=32, intermediate_size=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def deepseek_v3(**more):
    sizes = dict(
        SIZES, num_attention_heads=2, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=16,
        num_experts_per_tok=4, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32,
        qk_rope_head_dim=32, v_head_dim=32, vocab_size=320, rope_parameters=YARN, max_position_embeddings=163840,
    )  # fmt: skip
    return transformers.DeepseekV3Config(**sizes | more)


CONFIGS = {
    ("llama3", "small"): lambda: transformers.LlamaConfig(
        **SIZES, intermediate_size=192, rms_norm_eps=1e-5, rope_parameters=dict(LLAMA_ROPE), vocab_size=352,
        max_position_embeddings=131072,
    ),
    ("llama3", "debugmodel"): lambda: transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=16, intermediate_size=768, rms_norm_eps=1e-5,
        rope_parameters=dict(LLAMA_ROPE), vocab_size=320, max_position_embeddings=131072,
    ),
    # As Llama 3.2
    ("llama3", "tied"): lambda: transformers.LlamaConfig(
        **SIZES, intermediate_size=192, rms_norm_eps=1e-5, rope_parameters=LLAMA_ROPE | {"factor": 32.0},
        vocab_size=320, tie_word_embeddings=True, max_position_embeddings=131072,
    ),
    # Llama 3.0, without scaling
    ("llama3", "unscaled"): lambda: transformers.LlamaConfig(
        **SIZES, intermediate_size=192, rms_norm_eps=1e-5, vocab_size=320, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    # Like SmolLM: odd numbers of heads, no power of two, another base
    ("llama3", "odd"): lambda: transformers.LlamaConfig(
        hidden_size=96, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, intermediate_size=224,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, vocab_size=320,
        tie_word_embeddings=True, max_position_embeddings=2048,
    ),
    ("qwen3", "odd"): lambda: transformers.Qwen3Config(
        hidden_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=48,
        intermediate_size=160, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        vocab_size=320, max_position_embeddings=512,
    ),
    ("qwen3", "small"): lambda: transformers.Qwen3Config(**QWEN, vocab_size=352),
    ("qwen3", "small_tied"): lambda: transformers.Qwen3Config(**QWEN, vocab_size=320, tie_word_embeddings=True),
    # Experts of other features than any flavor's
    ("qwen3", "experts"): lambda: transformers.Qwen3MoeConfig(
        **QWEN, vocab_size=320, moe_intermediate_size=64, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True,
        max_position_embeddings=512,
    ),
    ("deepseek_v3", "scaled"): deepseek_v3,
    ("deepseek_v3", "unscaled"): lambda: deepseek_v3(
        q_lora_rank=None, n_shared_experts=2, max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip


MODEL_ARGS = {
    ("llama3", "tied"): {"enable_weight_tying": True, "rope_factor": 32.0, "max_seq_len": 131072},
    ("llama3", "unscaled"): {"rope_factor": 1.0, "max_seq_len": 8192},
    ("llama3", "odd"): {
        "dim": 96, "n_layers": 3, "n_heads": 3, "n_kv_heads": 1, "hidden_dim": 224, "norm_eps": 1e-6,
        "rope_theta": 10000.0, "rope_factor": 1.0,
    },
    ("qwen3", "odd"): {
        "dim": 96, "n_layers": 3, "n_heads": 6, "head_dim": 48, "hidden_dim": 160, "norm_eps": 1e-5,
        "rope_theta": 5e5,
    },
    ("qwen3", "experts"): {"moe_inter_dim": 64, "num_experts": 6, "top_k": 3},
    ("deepseek_v3", "scaled"): {"rope_original_seq_len": 4096},
    ("deepseek_v3", "unscaled"): {"rope_factor": 1.0, "load_balance_coeff": 1e-3},
}  # fmt: skip
"""[model_args] of the models whose shape is no flavor's: what differs from the nearest flavor"""


AGAIN = (("llama3", "small"), ("llama3", "tied"), ("qwen3", "odd"), ("qwen3", "experts"))
"""Models that are imported and exported twice"""


def sizes_of_flavors(model):
    sized = engine().SizedModel
    return {flavor: copy.deepcopy(sized.of_flavor(model, flavor).sizes) for flavor in sized.flavors(model)}


@pytest.fixture(autouse=True)
def flavors(monkeypatch):
    saved_runs.add_flavors(monkeypatch)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers") / "tokenizer"
    train_tokenizer(["def main(a, b):\n    return a + b\n" * 50], saved_runs.VOCABULARY, folder, print)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer):
    """Folders of random models as transformers writes them, by TorchTitan's model and flavor; the first in shards."""
    base = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for (model, flavor), config in CONFIGS.items():
        module = transformers.AutoModelForCausalLM.from_config(config())
        for parameter in module.parameters():
            if parameter.ndim == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if model == "deepseek_v3":  # TorchTitan's last norm has another epsilon, which small values show
            module.get_input_embeddings().weight.data.normal_()
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
        folder = base / model / flavor
        module.save_pretrained(folder, max_shard_size="100KB" if flavor == "small" else "5GB")
        for file in tokenizer.iterdir():
            shutil.copy(file, folder)
    return {name: base / name[0] / name[1] for name in CONFIGS}


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def check_logits(run, theirs):
    """Compare the model of a run with one of transformers, which differs by less than 1e-5."""
    tokens = torch.randint(0, 320, (2, 32))
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = saved_runs.load(open_run(run), has_converters=False)(tokens) - expected
    assert expected.std() > 0.1 and difference.abs().max() < 1e-5


@pytest.mark.parametrize("name", CONFIGS, ids="-".join)
def test_there_and_back(name, models, tmp_path):
    """TorchTitan computes the logits of transformers, and an export has the same bits."""
    source, run = models[name], tmp_path / "run"
    before_import = sizes_of_flavors(name[0])
    lines = import_model(source, run)
    config = tomli.loads((run / "config.toml").read_text())
    sizes = config.get("model_args", {})
    if name in MODEL_ARGS:
        positions = CONFIGS[name]().max_position_embeddings
        assert config["model"]["name"] == name[0] and sizes == {**MODEL_ARGS[name], "max_seq_len": positions}
        assert lines.count("with [model_args]") == 1
    else:
        assert (config["model"]["name"], config["model"]["flavor"]) == name
        assert sizes.keys() <= {"max_seq_len"}, "a flavor's shape is short"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source)
    biases = [buffer for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
    assert f" {sum(weight.numel() for weight in (*theirs.parameters(), *biases)):,} parameters, " in lines
    check_logits(run, theirs)
    export(run, tmp_path / "back")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert before_import == sizes_of_flavors(name[0]), "TorchTitan's flavors are as they were"
    again = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert again.rope_parameters == theirs.config.rope_parameters
    for field in ("tie_word_embeddings", "max_position_embeddings", "head_dim", "intermediate_size", "rms_norm_eps"):
        assert getattr(again, field) == getattr(theirs.config, field), field
    if name not in AGAIN:
        return
    # What was exported is imported and exported to the same bytes.
    import_model(tmp_path / "back", tmp_path / "run again")
    export(tmp_path / "run again", tmp_path / "back again")
    names = {path.name for path in (tmp_path / "back").iterdir()} - {REPORT_FILE}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    for file in names:
        assert (tmp_path / "back again" / file).read_bytes() == (tmp_path / "back" / file).read_bytes(), file


def test_routers_without_a_bias(models, monkeypatch):
    """All flavors but that of the tests have a bias."""
    monkeypatch.delitem(saved_runs.flavors_of("qwen3"), "small_experts")
    _, settings, model = find_model(read_shape(models["qwen3", "experts"]), "A")
    assert settings["load_balance_coeff"] == model.sizes["load_balance_coeff"] == 0


REFUSED = {
    "norm_topk_prob = False": lambda: transformers.Qwen3MoeConfig(),
    "n_group = 4": lambda: deepseek_v3(n_group=4),
    # As the flavor whose rotation has another mscale
    "n_group = 1": lambda: deepseek_v3(n_group=1, topk_group=1),
    "norm_eps = 1e-05": lambda: deepseek_v3(rms_norm_eps=1e-5),
    "'mscale': 0.7": lambda: deepseek_v3(rope_parameters=YARN | {"mscale": 0.7}),
    "attention_factor = 1.2": lambda: deepseek_v3(rope_parameters=YARN | {"attention_factor": 1.2}),
    "scoring_func = 'softmax'": lambda: deepseek_v3(scoring_func="softmax"),
    "num_shared_experts = 0": lambda: deepseek_v3(n_shared_experts=0),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_titan_does_not_compute_is_named(problem, tmp_path):
    REFUSED[problem]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as error:
        require_computed_alike(find_model(read_shape(tmp_path), "A")[2], "A")
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_the_folder_is_where_a_run_starts(models, tmp_path):
    source, run = models["qwen3", "small_tied"], tmp_path / "my run"
    assert import_model(source, run).endswith(f"train     mxtrain train '{run}/config.toml'"), "it can be pasted"
    settings = read_settings([f"--job.config_file={run / 'config.toml'}"])
    assert settings["job.dump_folder"] == str(run)
    example = LocalFiles(DataConfig(settings["training.dataset"], settings["training.dataset_path"]))
    size = sum(size for _, size, _ in example.listing)
    assert 100_000 < size < 1_000_000, "more than a few sequences, tokenized in a second"
    assert settings["model.converters"] == ["mxnorm"] and settings["data.vocab_size"] == 320
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (run / "tokenizer" / name).read_bytes() == (source / name).read_bytes()
    assert settings["model.hf_assets_path"] == str(run / "tokenizer")
    section, checkpoint = settings.values.checkpoint, run / "checkpoint" / "step-0"
    start = find_start(run, section, 1)
    assert start.step == 0 and "training starts from the weights in" in start.notes[0]
    assert find_start(tmp_path / "elsewhere", section, 1).step == 0
    assert section.initial_load_path == str(checkpoint), "a run elsewhere has the same weights"
    manifest = read_manifest(checkpoint)
    assert (manifest.step, manifest.holds_trainer, manifest.processes) == (0, False, 1)
    assert manifest.files.keys() == {path.name for path in checkpoint.iterdir()} - {"manifest.json"}
    check_sizes(checkpoint, manifest)
    expected = saved_runs.random_weights("qwen3", "small_tied")
    saved = read_index(checkpoint).state_dict_metadata
    assert {name: (tensor.size, tensor.properties.dtype) for name, tensor in saved.items()} == {
        name: (weight.shape, torch.float32) for name, weight in expected.items()
    }
    assert manifest.settings == tomli.loads((run / "config.toml").read_text())
    assert manifest.versions["torch"] == version("torch")


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_run_that_is_moved_goes_on_where_it_lies(has_begun, models, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "other" / "name"
    import_model(models["qwen3", "small_tied"], run)
    if has_begun:
        write_resolved_config(run, read_settings([f"--job.config_file={run / 'config.toml'}"]))
    moved.parent.mkdir()
    run.rename(moved)
    shutil.copytree(moved, run)  # another import takes the name
    for arguments in ([f"--job.config_file={moved / 'config.toml'}"], resolved(["--resume", str(moved)])):
        settings = read_settings(arguments)
        check_machine(settings, Machine(1, has_gpus=False))
        assert settings["job.dump_folder"] == str(moved)
        assert settings["model.hf_assets_path"] == str(moved / "tokenizer")
        assert settings["checkpoint.initial_load_path"] == str(moved / "checkpoint" / "step-0")
        assert find_start(moved, settings.values.checkpoint, 1).checkpoint == moved / "checkpoint" / "step-0"
    write_resolved_config(moved, settings)
    assert tomli.loads((moved / "config.toml").read_text())["job"]["dump_folder"] == str(moved), "it may move again"
    export(moved, tmp_path / "out")


def other_names(source):
    """Files as the base model and transformers 5 write them, and an index that other tools write."""
    module = transformers.AutoModelForCausalLM.from_pretrained(source)
    module.save_pretrained(source, save_original_format=False)
    fused = tensors_of(source)
    assert ("model.layers.1.mlp.experts.gate_up_proj" in fused) == hasattr(module.config, "num_experts_per_tok")
    is_tied = module.config.tie_word_embeddings
    layers = f"model.layers.{module.config.num_hidden_layers}"
    if is_tied:
        fused = {name.removeprefix("model."): tensor for name, tensor in fused.items()}
    elif module.config.model_type == "deepseek_v3":
        predicting = {"eh_proj": torch.ones(64, 128), "mlp.experts.3.up_proj": torch.ones(32, 64)}
        fused |= {f"{layers}.{name}.weight": tensor for name, tensor in predicting.items()}
    for file in source.glob("model*"):
        file.unlink()
    save_file(fused, source / "weights.safetensors")
    places = dict.fromkeys(fused, "./weights.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("name", [("qwen3", "experts"), ("deepseek_v3", "scaled"), ("qwen3", "small_tied")])
def test_other_names_are_the_same_tensors(name, models, tmp_path):
    source = shutil.copytree(models[name], tmp_path / "model")
    other_names(source)
    lines = import_model(source, tmp_path / "run")
    note = "note      model.layers.2, which predicts a second token, is left out, as by transformers"
    assert (note in lines) == (name[0] == "deepseek_v3")
    import_model(models[name], tmp_path / "expected")
    weights, expected = (open_run(tmp_path / run).weights for run in ("run", "expected"))
    names = read_index(tmp_path / "expected" / "checkpoint" / "step-0").state_dict_metadata
    assert all(torch.equal(weights[fqn], expected[fqn]) for fqn in names) and len(names) > 20


def test_half_precision_becomes_fp32(models, tmp_path):
    source = shutil.copytree(models["qwen3", "small"], tmp_path / "model")
    dtypes = [torch.bfloat16, torch.float16]
    halves = {name: tensor.to(dtypes[i % 2]) for i, (name, tensor) in enumerate(tensors_of(source).items())}
    for file in source.glob("model*"):
        file.unlink()
    save_file(halves, source / "model.safetensors")
    import_model(source, tmp_path / "run")
    weights = open_run(tmp_path / "run").weights
    assert weights["layers.0.attention.wq.weight"].dtype == torch.float32
    assert torch.equal(weights["norm.weight"], halves["model.norm.weight"].float())


@pytest.mark.parametrize("name, is_same", [(("qwen3", "small_tied"), False), (("llama3", "tied"), True)])
def test_two_tied_weights_are_one_if_they_are_the_same(is_same, name, models, tmp_path):
    """As transformers 5 has it. Frequencies, which older files hold, are not read either."""
    source, run = shutil.copytree(models[name], tmp_path / "model"), tmp_path / "run"
    tensors = tensors_of(source)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if is_same else torch.randn(embedding.shape) / 10
    frequencies = transformers.AutoConfig.from_pretrained(source).head_dim // 2
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(frequencies)
    save_file(tensors, source / "model.safetensors")
    lines = import_model(source, run)
    assert ("note      lm_head.weight is not tied to model.embed_tokens.weight: " in lines) != is_same
    check_logits(run, transformers.AutoModelForCausalLM.from_pretrained(source))
    export(run, tmp_path / "back")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").tie_word_embeddings == is_same


def test_an_export_has_what_the_model_had(models, tmp_path):
    """Several eos tokens, sampling settings and the template of chats."""
    source, run = shutil.copytree(models["qwen3", "small"], tmp_path / "model"), tmp_path / "run"
    edit_config(bos_token_id=3, eos_token_id=1)(source)
    sampling = {"eos_token_id": [1, 2], "pad_token_id": 2, "do_sample": True, "temperature": 0.6, "top_k": 20}
    (source / "generation_config.json").write_text(json.dumps(sampling))
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    import_model(source, run)
    elsewhere = tmp_path / "elsewhere" / "tokenizer"  # of a run that starts from these weights in another folder
    elsewhere.parent.mkdir()
    copy_tokenizer(run / "tokenizer", elsewhere)
    assert {path.name for path in elsewhere.iterdir()} == {path.name for path in (run / "tokenizer").iterdir()}
    export(run, tmp_path / "back")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "back").to_diff_dict()
    assert generation.items() >= (sampling | {"bos_token_id": 3}).items()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, [1, 2], 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_the_settings_of_a_config_are_kept(models, tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text(
        '[job]\ncustom_config_module = "mxtrain.titan.job_config"\n[experimental]\ncustom_import = "mxtrain.titan"\n'
        '[model]\nname = "llama3"\nflavor = "debugmodel"\nconverters = ["mx_linear"]\n[optimizer]\nlr = 0.125\n'
        "[checkpoint]\ninterval = 7\n[data]\nvocab_size = 0\n"
    )
    import_model(models["llama3", "debugmodel"], tmp_path / "run", config)
    settings = read_settings([f"--job.config_file={tmp_path / 'run' / 'config.toml'}"])
    assert settings["optimizer.lr"] == 0.125 and settings["model.converters"] == ["mx_linear"]
    assert settings["checkpoint.interval"] == 7 and settings["checkpoint.enable"]
    assert settings["data.vocab_size"] == 320, "0 stands for the flavor's size"


@pytest.mark.parametrize(
    "lines, sizes",
    [
        ("[training]\nseq_len = 4096\n", {"rope_factor": 1.0, "max_seq_len": 8192}),
        ("[training]\nseq_len = 8193\n", {"rope_factor": 1.0}),  # more than the model's positions
        ("[model_args]\nrope_factor = 1.0\nmax_seq_len = 9000\n", {"rope_factor": 1.0, "max_seq_len": 9000}),
    ],
)
def test_the_sizes_of_a_config_are_the_models(lines, sizes, models, tmp_path):
    (tmp_path / "mine.toml").write_text(lines)
    import_model(models["llama3", "unscaled"], tmp_path / "run", tmp_path / "mine.toml")
    assert tomli.loads((tmp_path / "run" / "config.toml").read_text())["model_args"] == sizes


def test_a_flavor_that_fits_comes_before_one_that_needs_fewer_settings(tmp_path):
    """The sizes are those of "debugmodel", but only "671B" has the routing."""
    heads = {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    experts = {"moe_intermediate_size": 256, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
    others = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 1024, "kv_lora_rank": 512}
    deepseek_v3(**heads, **experts, **others, q_lora_rank=None, n_group=8, topk_group=4).save_pretrained(tmp_path)
    assert find_model(read_shape(tmp_path), "A")[0] in ("671B", "small", "small_plain")


def test_a_scaled_rotation_needs_long_sequences(models, tmp_path):
    """TorchTitan scales DeepSeek's rotation only in sequences that are longer than before the scaling."""
    source = models["deepseek_v3", "scaled"]
    import_model(source, tmp_path / "run")
    assert tomli.loads((tmp_path / "run" / "config.toml").read_text())["training"]["seq_len"] == 2 * 4096
    (tmp_path / "mine.toml").write_text("[training]\nseq_len = 4096\n")
    with pytest.raises(ConfigError, match="training.seq_len = 4096 is too short .*; allowed is more than 4096$"):
        import_model(source, tmp_path / "short", tmp_path / "mine.toml")


def edit_config(**changes):
    def change(source):
        file = source / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def edit_sizes(size, **more):
    """Another model."""

    def change(source):
        config = transformers.LlamaConfig(
            hidden_size=size, num_hidden_layers=1, num_attention_heads=2, intermediate_size=96, vocab_size=320, **more
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)

    return change


def edit_tensors(change):
    def edit(source):
        tensors = tensors_of(source)
        change(tensors)
        save_file(tensors, source / "model.safetensors")

    return edit


def edit_weight(name, value):
    return edit_tensors(lambda tensors: tensors[name].view(-1)[-1].fill_(value))


def only_a_pickle(source):
    torch.save(tensors_of(source), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()


def larger_tokenizer(source):
    file = source / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["another"] = 320
    file.write_text(json.dumps(content))


BAD = {
    "no model": (lambda source: (source / "config.json").unlink(), "config.json is missing; name the folder of a Hug"),
    "architecture": (edit_config(model_type="gemma"), "model_type = 'gemma' in config.json is not one of"),
    "shape": (
        edit_config(hidden_size=96, head_dim=None),
        "lm_head.weight has shape [320, 256], but config.json makes it [320, 96]",
    ),
    "head_dim": (
        edit_sizes(64, head_dim=64),
        "head_dim = 64 in config.json must be 32 for TorchTitan's llama3",
    ),
    "layers": (edit_config(num_hidden_layers=7), "9 of 66 tensors are missing, such as model.layers.6."),
    "features": (
        edit_config(intermediate_size=800),
        "model.layers.0.mlp.down_proj.weight has shape [256, 768], but config.json makes it [256, 800]",
    ),
    "NaN": (edit_weight("model.layers.0.mlp.up_proj.weight", float("nan")), "model.layers.0.mlp.up_proj.weight has va"),
    "heads": (
        edit_config(num_key_value_heads=3),
        "config.json does not fit: n_heads = 16 is no multiple of n_kv_heads = 3",
    ),
    "tokenizer": (larger_tokenizer, "the tokenizer has 321 tokens, but vocab_size is 320"),
    "unexpected": (
        edit_tensors(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(256)})),
        "1 tensor(s) are not part of this model, such as model.layers.0.self_attn.q_proj.bias",
    ),
    "pickle": (
        only_a_pickle,
        "the folder has neither model.safetensors nor model.safetensors.index.json; save the model as",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_models_are_refused_in_one_line_and_nothing_is_written(case, models, tmp_path, monkeypatch):
    change, message = BAD[case]
    source = shutil.copytree(models["llama3", "debugmodel"], tmp_path / "model")
    change(source)
    monkeypatch.setattr(torch, "load", None)  # nothing is unpickled
    with pytest.raises(ConfigError) as error:
        import_model(source, tmp_path / "run")
    text = str(error.value)
    assert text.startswith(f"MODEL_DIR = {str(source)!r}: {message}") and "\n" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "text, message",
    [
        ('[model]\nname = "qwen3"\n', "model.name = 'qwen3' in {file} must be 'llama3', as in the model"),
        ('[model]\nflavor = "8B"\n', "model.flavor = '8B' in {file} must be 'debugmodel', as in"),
        ("[data]\nvocab_size = 2048\n", "data.vocab_size = 2048 in {file} must be 320, as in the model"),
        ("[model_args]\nrope_factor = 4.0\n", "model_args.rope_factor = 4.0 in {file} must be unset, as in the model"),
        ("[model_args]\ndim = 64\n", "model_args.dim = 64 in {file} must be unset, as in the model"),
        ("[training]\nsteps = 0\n", "training.steps = 0 "),
        (None, "config '{file}' does not exist"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(text, message, models, tmp_path):
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as error:
        import_model(models["llama3", "debugmodel"], tmp_path / "run", file)
    assert str(error.value).startswith(message.format(file=file)) and not (tmp_path / "run").exists()
