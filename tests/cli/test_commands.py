import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from mxtrain import cli


@pytest.mark.parametrize(
    "command", ["export RUN {}", "import MODEL {}", "compare A -o {}", "plot A -o {}", "generate {}"]
)
def test_an_address_in_the_place_of_a_folder_is_refused(capsys, command):
    with pytest.raises(SystemExit) as exit:
        cli.main(command.format("s3://bucket/out").split())
    assert exit.value.code == 2
    assert "'s3://bucket/out' is an address, and mxtrain reads and writes only paths of this" in capsys.readouterr().err


def test_help_names_every_command_and_each_has_help_with_an_example(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--help"])
    assert exit.value.code == 0
    names = "train prepare configs init plot compare export import generate eval certify doctor"
    commands = names.split()
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {command}\s", text, re.MULTILINE) for command in commands)
    for command in commands:
        with pytest.raises(SystemExit) as exit:
            cli.main([command, "--help"])
        assert exit.value.code == 0
        text = capsys.readouterr().out
        assert f"usage: mxtrain {command}" in text
        assert f"\n  mxtrain {command}" in text, command


def test_a_preset_that_does_not_exist_is_one_line(capsys):
    assert cli.main(["init", "lama3_debug"]) == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed == "mxtrain: error: NAME = 'lama3_debug' is not a preset; 'mxtrain configs' lists the presets"


def test_a_command_whose_stdout_is_closed_does_its_work():
    command = f"{shlex.quote(sys.executable)} -m mxtrain.cli configs"
    repository = Path(cli.__file__).parents[2]
    done = subprocess.run(["sh", "-c", f"{command} >&-"], cwd=repository, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_whose_reader_has_enough_ends_without_a_word(tmp_path):
    command = [sys.executable, "-m", "mxtrain.cli", "train", "--help"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    "line, why",
    [
        ("", "required: COMMAND"), ("trian", "COMMAND: invalid choice: 'trian'"), ("prepare", "required: CONFIG"),
        ("plot", "required: RUN"), ("plot a --x epochs", "--x: invalid choice: 'epochs'"),
        ("plot a --smooth 0", "--smooth: 0 is not an integer of at least 1"), ("compare a --seeds 0", "--seeds: 0 is"),
        ("export a b --dtype float8", "--dtype: invalid choice: 'float8'"),
        ("certify a --write b", "--write: not allowed with argument FILE"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_exits_with_2_and_usage(line, why, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(line.split())
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: mxtrain") and why in error


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_config_that_cannot_be_read_is_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mxtrain.cli.train_command.hide_library_warnings", lambda: None)
    (tmp_path / "b.toml").write_text("steps = \n")
    for name, problem in {"a": "config 'a.toml' does not exist", "b": "config 'b.toml' is not valid TOML"}.items():
        assert cli.main([command, f"{name}.toml", "--training.steps", "3"]) == 2
        out, err = capsys.readouterr()
        assert err.startswith(f"mxtrain: error: {problem}") and err.count("\n") == 1 and out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["b.toml"]


def test_flags_after_the_config_are_titans_even_those_that_argparse_knows(monkeypatch):
    seen = []
    monkeypatch.setattr("mxtrain.cli.launch.train", lambda config, flags, others: seen.append((config, flags)) or 7)
    assert cli.main(["train", "a.toml", "--training.steps", "3", "-x", "--", "-o"]) == 7
    assert seen == [("a.toml", ["--training.steps", "3", "-x", "--", "-o"])]


def test_verbose_goes_to_the_workers_before_and_after_the_config(monkeypatch):
    seen, hidden = [], []
    monkeypatch.delenv("MXTRAIN_VERBOSE", raising=False)
    monkeypatch.setattr("mxtrain.cli.launch.train", lambda config, flags, others: seen.append([*flags, *others]) or 0)
    monkeypatch.setattr("mxtrain.cli.train_command.hide_library_warnings", lambda: hidden.append(True))
    for arguments in (["--verbose", "a.toml", "-x"], ["a.toml", "--verbose", "-x"], ["a.toml", "-x"]):
        assert cli.main(["train", *arguments]) == 0
    assert seen == [["-x", "--verbose"], ["-x", "--verbose"], ["-x"]] and hidden == [True]


def test_help_after_a_config_shows_all_settings_with_its_values(tmp_path, monkeypatch, capsys):
    (tmp_path / "base.toml").write_text("[training]\nsteps = 12345\n")
    (tmp_path / "a.toml").write_text('extends = "base.toml"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("mxtrain.cli.train_command.hide_library_warnings", lambda: None)
    assert cli.main(["train", "a.toml", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: mxtrain train ") and "(set to 12345; default: 10000)" in text
    assert all(part in text for part in ("--mxnorm.p {1,2}", "--mxnorm.filter_fqns A,B,...", "Exponent of the p-mean"))
    assert not (tmp_path / "outputs").exists()
    (tmp_path / "base.toml").write_text("[training]\nstep = 12345\n")
    assert cli.main(["train", "a.toml", "--help"]) == 2
    message = "training.step is not a setting; did you mean training.steps? (base.toml, line 2)"
    assert capsys.readouterr().err == f"mxtrain: error: {message}\n"


def test_prepare_prints_progress_and_the_report_and_nothing_else(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("\n\n".join(f"paragraph {i} of a small text" for i in range(400)))
    (tmp_path / "a.toml").write_text(
        '[training]\ndataset = "files"\ndataset_path = "text.txt"\n[data]\nvocab_size = 300\ncache_dir = "cache"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mxtrain.cli.train_command.hide_library_warnings", lambda: None)
    assert cli.main(["prepare", "a.toml"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("preparing dataset 'files' in ") and lines[4] == "prepared dataset 'files'"
    assert "tokens" in "".join(lines[5:]) and "train" in "".join(lines[5:]) and "\x1b" not in out and err == ""
    assert (tmp_path / "cache").is_dir()
    assert cli.main(["prepare", "a.toml", "--training.dataset_path", "gone.txt"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("mxtrain: error: training.dataset_path")


def test_an_interrupt_prints_one_line(monkeypatch, capsys):
    monkeypatch.setattr("mxtrain.cli.launch.train", mock.Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["train", "a.toml"]) == 130
    assert capsys.readouterr().err == "mxtrain: stopped by SIGINT\n"
