"""``mxtrain generate`` and ``mxtrain eval`` from the command line. tests/hugging_face tests what they compute."""

import io
import json
import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mxtrain import cli
from mxtrain.data.documents import Progress
from mxtrain.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a text and files that are none."""
    folder = tmp_path_factory.mktemp("commands")
    text = "def main():\n    return 1\n"
    train_tokenizer([text], 300, folder / "model", Progress(lambda line: None))
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=1)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "text.py").write_text(text)
    (folder / "empty").write_text("")
    (folder / "binary").write_bytes(b"\xff\xfe")
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text("")
    return folder


@pytest.fixture
def run(folder, capsys):
    """Run a command with "@" for the folder; return its status, stdout and stderr."""

    def run(line: str):
        capsys.readouterr()
        status = cli.main([word.replace("@", f"{folder}/").replace("_", " ") for word in line.split()])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_generate_prints_the_text_and_nothing_else(run):
    line = "generate @model def_main --seed 1 --max-new-tokens 8 --temperature 2"
    status, text, errors = run(line)
    assert (status, errors) == (0, "") and text.startswith("def main") and len(text) > 9
    assert run(line)[1] == text != run(line.replace("1", "2"))[1]


@pytest.mark.parametrize("command", ["generate @model x --max-new-tokens 2", "eval @model @text.py"])
def test_a_command_ends_quietly_when_nobody_reads(command, folder, monkeypatch, capfd):
    """As in "mxtrain eval ... | head -0": the error comes when the buffer is written."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert cli.main([word.replace("@", f"{folder}/") for word in command.split()]) == 141
        print("lost", flush=True)
    assert capfd.readouterr().err == ""


def test_generate_replaces_characters_that_stdout_lacks(folder, monkeypatch):
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert cli.main(["generate", str(folder / "model"), "caf\u00e9", "--max-new-tokens", "1", "--greedy"]) == 0
        assert stdout.buffer.getvalue().startswith(b"caf?")


def test_text_that_is_not_utf8_is_one_line(folder, capsys):
    assert cli.main(["generate", str(folder / "model"), os.fsdecode(b"x\xff")]) == 2
    message = "TEXT = 'x\\udcff' is not UTF-8 text: character 1 is wrong; give it in UTF-8\n"
    assert capsys.readouterr().err == f"mxtrain: error: {message}"


def test_eval_prints_its_figures_and_nothing_else(run, folder):
    status, text, errors = run("eval @model @text.py @text.py --seq-len 16")
    assert (status, errors) == (0, "")
    figures = {row[:12].strip(): row[12:].split()[0] for row in text.splitlines()}
    assert list(figures) == ["loss", "perplexity", "bits/byte", "tokens", "bytes"]
    assert figures["bytes"] == str(2 * len((folder / "text.py").read_text()))
    assert 5 < float(figures["loss"]) < 6.5, "close to ln 300, that of random weights"
    assert run("eval @model @text.py --max-tokens 3")[1].count("tokens      3\n") == 1


@pytest.mark.parametrize(
    ("line", "says"),
    {
        "generate @nothing x": "RUN = '@nothing' does not exist",
        "generate @text.py x": "RUN = '@text.py' is not a folder",
        "generate @ x": "RUN = '@' is neither a run (config.toml is missing) nor a Hugging Face model (config.json",
        "generate @run x": "RUN = '@run' has no whole checkpoint in @run/checkpoint",
        "generate @model x --step 1": "--step = 1: RUN = '@model' is a Hugging Face model, which has no steps",
        "generate @model x --greedy --top-p 0.5": "--greedy draws nothing: it does not go with --top-p",
        "generate @model x --temperature 0": "--temperature = 0.0 is not a positive number; --greedy stands for 0",
        "generate @model x --max-new-tokens 99": "--max-new-tokens = 99 after a prompt of 2 tokens exceeds",
        "eval @nothing @text.py": "RUN = '@nothing' does not exist",
        "eval @model @nothing": "FILE = '@nothing' cannot be read: No such file or directory",
        "eval @model @run": "FILE = '@run' cannot be read: Is a directory",
        "eval @model @text.py @empty": "FILE = '@empty' is empty",
        "eval @model @binary": "FILE = '@binary' is not UTF-8 text: byte 0 is wrong",
        "eval @model @text.py --seq-len 33": "--seq-len = 33 is longer than the model's longest sequence, 32",
        "eval @model @text.py --seq-len 0": "--seq-len = 0 is not an integer of at least 1",
        "eval @run @text.py": "RUN = '@run' has no whole checkpoint in @run/checkpoint",
    }.items(),
)
def test_bad_input_is_one_line(line, says, run, folder):
    status, text, errors = run(line)
    assert (status, text) == (2, "") and errors.count("\n") == 1
    assert (
        errors.removeprefix("mxtrain: error: ")
        .replace(f"{folder}/", "@")
        .replace(f"'{folder}'", "'@'")
        .startswith(says)
    )


def test_a_model_without_weights_is_one_line(run, folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert cli.main(["generate", str(tmp_path), "x"]) == 2
