"""``mxtrain export``, ``import``, ``generate`` and ``eval`` from the command line."""

import io
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mxtrain import cli
from mxtrain.data.documents import Progress
from mxtrain.data.tokenizer import train_tokenizer
from mxtrain.files import hash_file
from mxtrain.hugging_face.model_config import REPORT_FILE
from tests.support import saved_runs


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


def test_the_options_reach_transformers(folder, monkeypatch):
    seen = []
    monkeypatch.setattr(LlamaForCausalLM, "generate", lambda model, inputs, **options: seen.append(options))
    for words in ([], ["--temperature", "0.5", "--top-p", "0.9", "--max-new-tokens", "7"], ["--greedy"]):
        assert cli.main(["generate", str(folder / "model"), "x", *words]) == 0
    names = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens")
    assert [tuple(options.get(name) for name in names) for options in seen] == [
        (True, 0.8, 0.95, 0, 30),
        (True, 0.5, 0.9, 0, 7),
        (False, None, None, None, 30),
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


def test_generate_replaces_characters_that_stdout_lacks(folder, monkeypatch):
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert cli.main(["generate", str(folder / "model"), "caf\u00e9", "--max-new-tokens", "1", "--greedy"]) == 0
        assert stdout.buffer.getvalue().startswith(b"caf?")


def test_eval_prints_its_figures_and_nothing_else(run, folder):
    text = (folder / "text.py").read_text()
    (folder / "windows.py").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())  # read as in training
    status, text, errors = run("eval @model @text.py @windows.py --seq-len 16")
    assert (status, errors) == (0, "")
    figures = {row[:12].strip(): row[12:].split()[0] for row in text.splitlines()}
    assert list(figures) == ["loss", "perplexity", "bits/byte", "tokens", "bytes"]
    assert figures["bytes"] == str(2 * len((folder / "text.py").read_text()))
    assert 5 < float(figures["loss"]) < 6.5, "close to ln 300, that of random weights"
    assert run("eval @model @text.py --max-tokens 3")[1].count("tokens      3\n") == 1


@pytest.mark.parametrize(
    ("line", "says"),
    {
        "generate @nothing x": "RUN = '@nothing' is neither a run (config.toml is missing) nor a",
        "generate @ x": "RUN = '@' is neither a run (config.toml is missing) nor a Hugging Face model (config.json",
        "generate @run x": "RUN = '@run' has no whole checkpoint in @run/checkpoint",
        "generate @model x --step 1": "--step = 1: RUN = '@model' is a Hugging Face model, which has no steps",
        "generate @model x --greedy --top-p 0.5": "--greedy draws nothing: it does not go with --top-p",
        "generate @model x\udcff": "TEXT = 'x\\udcff' is not UTF-8 text",
        "generate @model x --temperature 0": "--temperature = 0.0 is not a positive number; --greedy stands for 0",
        "generate @model x --temperature nan": "--temperature = nan is not a positive",
        "generate @model x --top-p 1.1": "--top-p = 1.1 is not above 0",
        "generate @model x --seed -1": "--seed = -1 is not an integer from 0",
        f"generate @model x --seed {2**64}": f"--seed = {2**64} is not an integer from 0",
        "generate @model x --max-new-tokens 99": "--max-new-tokens = 99 after a prompt of 2 tokens exceeds",
        "eval @model @nothing": "FILE = '@nothing' cannot be read: No such file or directory",
        "eval @model @run": "FILE = '@run' cannot be read: Is a directory",
        "eval @model @text.py @empty": "FILE = '@empty' is empty",
        "eval @model @binary": "FILE = '@binary' is not UTF-8 text: byte 0 is wrong",
        "eval @run @text.py": "RUN = '@run' has no whole checkpoint in @run/checkpoint",
    }.items(),
)
def test_bad_input_is_one_line(line, says, run, folder):
    status, text, errors = run(line)
    assert (status, text) == (2, "") and errors.count("\n") == 1
    shown = errors.replace(f"{folder}/", "@").replace(f"'{folder}'", "'@'")
    assert shown.startswith(f"mxtrain: error: {says}")


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

    evaluation = [tmp_path / "text" / "0.txt", "--max-tokens", 50]
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
    with monkeypatch.context() as gone:  # not longer: pytest makes temporary files, too
        gone.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        assert cli.main(["generate", str(run), "x"]) == 2
    assert "needs a temporary folder for its export: No such file" in capfd.readouterr().err


@pytest.fixture
def exports(monkeypatch):
    """The arguments that the export gets."""
    from mxtrain.titan.hugging_face import export

    calls = []
    monkeypatch.setattr(export, "export", lambda *args, **options: calls.append((args, options)) or (3, "lines"))
    return calls


def test_the_options_reach_the_export(exports, capsys):
    assert cli.main(["export", "a", "b"]) == 0
    words = ["--step", "7", "--fold-gain", "--dtype", "bfloat16"]
    assert cli.main(["export", "a", "b", *words]) == 0
    plain = {"format": "hf", "step": None, "fold_gain": False, "dtype": None}
    given = {"step": 7, "fold_gain": True, "dtype": torch.bfloat16}
    paths = (Path("a"), Path("b"))
    assert exports == [(paths, plain), (paths, plain | given)]
    assert capsys.readouterr().out == "lines\nlines\n"


@pytest.mark.parametrize("option", ["--device", "--loss-tokens"])
def test_a_removed_option_of_an_export_is_one_line(option, exports, capsys):
    assert cli.main(["export", "a", "b", option, "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mxtrain: error: 'mxtrain export {option}' no longer exists: ") and error.count("\n") == 1
    assert exports == []


def test_the_arguments_reach_the_import(monkeypatch, capsys):
    from mxtrain.titan.hugging_face import import_model

    calls = []
    monkeypatch.setattr(import_model, "import_model", lambda *args: calls.append(args) or "lines")
    assert cli.main(["import", "a", "b"]) == 0
    assert cli.main(["import", "a", "b", "--config", "c.toml"]) == 0
    assert calls == [(Path("a"), Path("b"), None), (Path("a"), Path("b"), Path("c.toml"))]
    assert capsys.readouterr().out == "lines\nlines\n"


@pytest.mark.parametrize("model", ["nowhere", "."])
def test_a_folder_without_a_model_is_one_line(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", model, "run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mxtrain: error: MODEL_DIR = {str(Path(model))!r}: config.json is missing")
    assert error.count("\n") == 1 and list(tmp_path.iterdir()) == []
