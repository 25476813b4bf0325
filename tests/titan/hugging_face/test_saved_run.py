import pytest
import torch

from mxtrain.errors import ConfigError
from mxtrain.titan.hugging_face.saved_run import open_run
from tests.support import saved_runs
from tests.support.hostile_pickles import NAME, put_code_into_index


def shapes_of(saved):
    return {fqn: tuple(weight.shape) for fqn, weight in saved.build().state_dict().items()}


@pytest.fixture
def run(tmp_path, monkeypatch):
    saved_runs.add_flavors(monkeypatch)
    return saved_runs.save_run(tmp_path / "run", "qwen3", "small_tied")


def test_weights_are_read_as_they_were_saved(run):
    saved = open_run(run)
    weights = saved_runs.random_weights("qwen3", "small_tied")
    assert all(torch.equal(saved.weights[fqn], weight) for fqn, weight in weights.items())
    assert "output.weight" in saved.weights and "other" not in saved.weights
    saved.weights.require(shapes_of(saved))


def test_the_second_of_two_tied_weights_may_be_missing(run):
    weights = saved_runs.random_weights("qwen3", "small_tied")
    del weights["output.weight"]
    saved_runs.save_weights(run / "checkpoint" / "step-4", weights)
    saved = open_run(run)
    saved.weights.require(shapes_of(saved), optional=("output.weight",))
    with pytest.raises(ConfigError, match="output.weight is missing"):
        saved.weights.require(shapes_of(saved))
    model = saved.load(torch.device("cpu"), has_converters=False)
    assert model.output.weight is model.tok_embeddings.weight
    assert torch.equal(model.output.weight, weights["tok_embeddings.weight"])


def test_a_checkpoint_of_bf16_is_loaded_into_fp32(run):
    weights = {fqn: weight.bfloat16() for fqn, weight in saved_runs.random_weights("qwen3", "small_tied").items()}
    saved_runs.save_weights(run / "checkpoint" / "step-4", weights)
    saved, target = open_run(run).weights, torch.empty(64)
    assert saved["norm.weight"].dtype == torch.bfloat16
    saved.load_into({"norm.weight": target})
    assert torch.equal(target, weights["norm.weight"].float())


def test_a_mode_that_this_machine_lacks_does_not_matter(run):
    config = run / "config.toml"
    config.write_text(config.read_text() + '[mxnorm]\nmode = "native"\n')
    saved_runs.add_manifest(run / "checkpoint" / "step-3")
    assert open_run(run).job_config.mxnorm.mode == "auto"


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda file: file.unlink(), "__0_0.distcp is missing"),
        (lambda file: file.write_bytes(b""), "__0_0.distcp has 0 bytes instead of"),
        (flip, "__0_0.distcp has other content than was saved"),
    ],
)
def test_a_file_that_differs_from_the_manifest_is_refused(damage, message, run):
    checkpoint = run / "checkpoint" / "step-3"
    assert open_run(run).step == 3
    damage(checkpoint / "__0_0.distcp")
    with pytest.raises(ConfigError, match=message):
        open_run(run)


def test_no_code_in_a_checkpoint_is_run(run, tmp_path):
    put_code_into_index(run / "checkpoint" / "step-3", tmp_path / "mark")
    saved = open_run(run)
    with pytest.raises(ConfigError, match=rf"^RUN: the checkpoint .*\.metadata cannot be loaded: it names {NAME}, and"):
        saved.weights.require(shapes_of(saved))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "processes, precision, expected",
    [(1, "bfloat16", "float32"), (2, "bfloat16", "bfloat16"), (2, "float32", "float32")],
)
def test_the_dtype_of_the_weights_in_the_forward(processes, precision, expected, run):
    """One process keeps fp32 weights, and rounds activations; FSDP rounds the weights that it gathers."""
    config = run / "config.toml"
    config.write_text(config.read_text().replace("[training]", f'[training]\nmixed_precision_param = "{precision}"'))
    saved_runs.add_manifest(run / "checkpoint" / "step-3", processes)
    assert open_run(run).weight_dtype == getattr(torch, expected)


def test_the_settings_are_those_of_the_checkpoint(run):
    """The run resumed with another p, and has saved nothing since."""
    config = run / "config.toml"
    config.write_text(config.read_text() + "[mxnorm]\np = 1\n")
    assert open_run(run).job_config.mxnorm.p == 2


def test_the_defaults_are_those_that_the_checkpoint_was_saved_with(run):
    """A version with other defaults must not say that the run had them."""
    defaults = {"mxnorm.p": 1, "training.seq_len": 64, "mxnorm.recipe": "mxfp8", "gone.by": 1}
    saved_runs.add_manifest(run / "checkpoint" / "step-3", defaults=defaults)
    job_config = open_run(run).job_config
    assert (job_config.mxnorm.p, job_config.training.seq_len, job_config.mxnorm.recipe) == (1, 32, "mxfp8")
