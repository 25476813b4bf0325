"""``mxtrain export``, ``import``, ``generate`` and ``eval`` from the command line; figures against sums by hand."""

import json
import math
import os
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mxtrain import cli
from mxtrain.cli import hub_commands
from mxtrain.data.tokenizer import train_tokenizer
from mxtrain.files import hash_file
from mxtrain.hugging_face.model_config import REPORT_FILE
from mxtrain.hugging_face.text import load
from tests.support import saved_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a text and files that are none."""
    folder = tmp_path_factory.mktemp("commands")
    text = "def main():\n    return 1\n"
    train_tokenizer([text], 300, folder / "model", lambda line: None)
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


def test_the_options_reach_transformers(folder, monkeypatch):
    seen = []
    monkeypatch.setattr(LlamaForCausalLM, "generate", lambda model, inputs, **options: seen.append(options))
    for words in ([], ["--temperature", "0.5", "--top-p", "0.9", "--max-new-tokens", "7"], ["--greedy"]):
        assert cli.main(["generate", str(folder / "model"), "x", *words]) == 0
    names = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens")
    assert [tuple(options.get(name) for name in names) for options in seen] == [
        (True, 0.8, 0.95, 0, 100),
        (True, 0.5, 0.9, 0, 7),
        (False, None, None, None, 100),
    ]


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


def test_eval_prints_its_figures_and_nothing_else(run, folder):
    text = (folder / "text.py").read_text()
    (folder / "windows.py").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())  # read as in training
    status, text, errors = run("eval @model @text.py @windows.py --seq-len 16")
    assert (status, errors) == (0, "")
    figures = {row[:12].strip(): row[12:].split()[0] for row in text.splitlines()}
    assert list(figures) == ["loss", "perplexity", "bits/byte", "tokens", "bytes"]
    assert figures["bytes"] == str(2 * len((folder / "text.py").read_text()))
    loss, tokens = float(figures["loss"]), float(figures["tokens"])
    assert 5 < loss < 6.5, "close to ln 300, that of random weights"
    assert float(figures["perplexity"]) == pytest.approx(math.exp(loss), rel=1e-3)
    assert float(figures["bits/byte"]) == pytest.approx(loss * tokens / math.log(2) / float(figures["bytes"]), rel=1e-3)


@pytest.mark.parametrize("seq_len", [8, 5, 32])
def test_every_token_is_predicted_once_with_the_context_of_its_window(seq_len, folder):
    """In bf16, too, whose logits are summed in fp32. Windows overlap only at the end."""
    model, _, encode = load(folder / "model")
    tokens = encode((folder / "text.py").read_text())
    count = len(tokens) - 1
    for dtype in (torch.float32, torch.bfloat16):
        expected = 0.0
        for i in range(count):
            begin = max(0, count - seq_len) if i >= count // seq_len * seq_len else i // seq_len * seq_len
            with torch.no_grad():
                ids = torch.tensor([tokens[begin : i + 1]], device=model.device)
                logits = model.to(dtype)(ids).logits[0, -1].double()
            expected -= logits.log_softmax(0)[tokens[i + 1]].item()
        assert hub_commands._nats(model, tokens, seq_len) == pytest.approx(
            expected, rel=1e-5 if dtype == torch.float32 else 1e-3
        )


@pytest.mark.parametrize(
    ("line", "says"),
    {
        "generate @ x": "RUN = '@' holds no config.toml; name the folder of a run",
        "generate @run x": "RUN = '@run' has no whole checkpoint in @run/checkpoint",
        "generate @model x --step 1": "--step = 1 needs a run, and RUN = '@model' is a Hugging Face model",
        "generate @model x --temperature 0": "transformers cannot continue this text: ValueError: `temperature` (=0.0)",
        "eval @model @nothing": "FILE = '@nothing' cannot be read: No such file or directory",
        "eval @model @text.py @empty": "FILE = '@empty' is empty",
        "eval @model @binary": "FILE = '@binary' is not UTF-8 text (byte 0); save it as UTF-8",
        "eval @model @text.py --seq-len 33": "--seq-len = 33 is too long for the model; allowed is 1 to 32",
    }.items(),
)
def test_bad_input_is_one_line(line, says, run, folder):
    status, text, errors = run(line)
    assert (status, errors.count("\n")) == (2, 1) and text in ("", "x")  # the prompt
    shown = errors.replace(f"{folder}/", "@").replace(f"'{folder}'", "'@'")
    assert shown.startswith(f"mxtrain: error: {says}")


def test_without_a_temporary_folder_there_is_one_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    expected = "mxtrain: error: an export needs a temporary folder: No such file or directory\n"
    assert run("generate @ x") == (2, "", expected)


def test_a_run_is_exported_to_a_temporary_folder(tmp_path, monkeypatch, capfd):
    """It leaves nothing, in the run or elsewhere, and gives the figures of an export."""
    saved_runs.add_flavors(monkeypatch)
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(f"def main{i}(a, b):\n    return a + b * {i}\n" * 12)
    run = saved_runs.save_run(tmp_path / "run", "llama3", "small", text=tmp_path / "text")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = sorted(tmp_path.rglob("*"))

    def output(*words) -> str:
        capfd.readouterr()
        assert cli.main([*map(str, words)]) == 0
        captured = capfd.readouterr()
        assert captured.err == ("mxtrain: exported step 3 to a temporary folder\n" if run in words else "")
        return captured.out

    evaluation = [tmp_path / "text" / "0.txt"]
    figures = output("eval", run, *evaluation)
    assert "bits/byte" in figures
    assert output("generate", run, "def main", "--greedy", "--max-new-tokens", 3).startswith("def main")
    assert sorted(tmp_path.rglob("*")) == before
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert output("eval", tmp_path / "out", *evaluation) == figures
    kept = json.loads((tmp_path / "out" / REPORT_FILE).read_text())["manifest_sha256"]
    assert kept == hash_file(run / "checkpoint" / "step-3" / "manifest.json").sha256
    (tmp_path / "out" / "model.safetensors").unlink()
    assert cli.main(["generate", str(tmp_path / "out"), "x"]) == 2
    assert cli.main(["eval", str(run), *map(str, evaluation), "--step", "4"]) == 2
    assert "--step = 4" in capfd.readouterr().err and sorted((tmp_path / "temporary").iterdir()) == []


@pytest.fixture
def exports(monkeypatch):
    """The arguments that the export gets."""
    from mxtrain.titan.hugging_face import export

    calls = []
    monkeypatch.setattr(export, "export", lambda *args, **options: calls.append((args, options)) or (3, "lines"))
    return calls


def test_the_options_reach_the_export(exports, capsys):
    assert cli.main(["export", "a", "b"]) == 0
    assert cli.main(["export", "a", "b", "--step", "7", "--fold-gain", "--dtype", "bfloat16"]) == 0
    plain = {"format": "hf", "step": None, "fold_gain": False, "dtype": None}
    paths = (Path("a"), Path("b"))
    assert exports == [(paths, plain), (paths, plain | {"step": 7, "fold_gain": True, "dtype": torch.bfloat16})]
    assert capsys.readouterr().out == "lines\nlines\n"


def test_the_arguments_reach_the_import(monkeypatch, capsys):
    from mxtrain.titan.hugging_face import import_model

    calls = []
    monkeypatch.setattr(import_model, "import_model", lambda *args: calls.append(args) or "lines")
    assert cli.main(["import", "a", "b"]) == 0
    assert cli.main(["import", "a", "b", "--config", "c.toml"]) == 0
    assert calls == [(Path("a"), Path("b"), None), (Path("a"), Path("b"), Path("c.toml"))]
    assert capsys.readouterr().out == "lines\nlines\n"
