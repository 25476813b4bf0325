import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mxtrain import cli
from tests.support.forked import Forked


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": s, "loss": 9.0 - s, "tokens_per_second": 100.0, "memory_gib": 1.5} for s in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    "command", ["export RUN {}", "import MODEL {}", "compare A -o {}", "plot A -o {}", "report A -o {}", "generate {}"]
)
def test_an_address_in_the_place_of_a_folder_is_refused(capsys, command):
    with pytest.raises(SystemExit) as exit:
        cli.main(command.format("s3://bucket/out").split())
    assert exit.value.code == 2
    assert "'s3://bucket/out' is an address, and mxtrain reads and writes paths of this" in capsys.readouterr().err


def test_help_names_every_command_and_each_has_help_with_an_example(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--help"])
    assert exit.value.code == 0
    names = "train prepare configs init cache plot compare report export import generate eval doctor completion"
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


def test_a_command_whose_stdout_is_closed_does_its_work():
    command = f"{shlex.quote(sys.executable)} -m mxtrain.cli configs"
    repository = Path(cli.__file__).parents[2]
    done = subprocess.run(["sh", "-c", f"{command} >&-"], cwd=repository, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["plot"], ["report"], ["export", "out"], ["train", "--resume"]])
def test_a_name_that_is_too_long_is_one_line(words, capsys):
    name = "x" * 300
    assert cli.main([words[0], name, *words[1:]] if words[-1] != "--resume" else [*words, name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"mxtrain: error: '{name}[a-z/.]*': File name too long", line)


def test_help_whose_reader_has_enough_ends_without_a_word(tmp_path):
    command = [sys.executable, "-m", "mxtrain.cli", "train", "--help"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("arguments", [[], ["trian"], ["prepare"], ["plot"], ["report"]])
def test_a_wrong_command_line_exits_with_2_and_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith("usage: mxtrain")


def test_a_missing_config_is_one_clean_line(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "mxtrain.cli", "train", "nowhere.toml"], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 2
    assert result.stderr == "mxtrain: error: config 'nowhere.toml' does not exist\n"
    assert result.stdout == "" and list(tmp_path.iterdir()) == []


def test_flags_after_the_config_are_titans_even_those_that_argparse_knows(monkeypatch):
    seen = []
    monkeypatch.setattr("mxtrain.cli.launch.train", lambda config, flags, others: seen.append((config, flags)) or 7)
    assert cli.main(["train", "a.toml", "--training.steps", "3", "-x", "--", "-o"]) == 7
    assert seen == [("a.toml", ["--training.steps", "3", "-x", "--", "-o"])]


def test_verbose_goes_to_the_workers_before_and_after_the_config(monkeypatch):
    seen, hidden = [], []
    monkeypatch.delenv("MXTRAIN_VERBOSE", raising=False)
    monkeypatch.setattr("mxtrain.cli.launch.train", lambda config, flags, others: seen.append([*flags, *others]) or 0)
    monkeypatch.setattr("mxtrain.cli.quiet.hide_library_warnings", lambda: hidden.append(True))
    for arguments in (["--verbose", "a.toml", "-x"], ["a.toml", "--verbose", "-x"], ["a.toml", "-x"]):
        assert cli.main(["train", *arguments]) == 0
    assert seen == [["-x", "--verbose"], ["-x", "--verbose"], ["-x"]] and hidden == [True]


def test_help_after_a_config_shows_all_settings_with_its_values(tmp_path, monkeypatch, capsys):
    (tmp_path / "base.toml").write_text("[training]\nsteps = 12345\n")
    (tmp_path / "a.toml").write_text('extends = "base.toml"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("mxtrain.cli.quiet.hide_library_warnings", lambda: None)
    assert cli.main(["train", "a.toml", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: mxtrain train ")
    mxtrains = ("--mxnorm.p {1,2}", "--mxnorm.filter_fqns A,B,...", "--fused_rmsnorm.when_compiled")
    sections = (*mxtrains, "--data.vocab_size", "--training.steps")
    places = [text.index(part) for part in sections]
    assert places == sorted(places) and "(set to 12345; default: 10000)" in text and "Exponent of the p-mean" in text
    assert not (tmp_path / "outputs").exists()
    (tmp_path / "base.toml").write_text("[training]\nstep = 12345\n")
    assert cli.main(["train", "a.toml", "--help"]) == 2
    message = "training.step is not a setting; the closest is training.steps (base.toml, line 2)"
    assert capsys.readouterr().err == f"mxtrain: error: {message}\n"


def test_prepare_prints_progress_and_the_report_and_nothing_else(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("\n\n".join(f"paragraph {i} of a small text" for i in range(400)))
    (tmp_path / "a.toml").write_text(
        '[training]\ndataset = "files"\ndataset_path = "text.txt"\n[data]\nvocab_size = 300\ncache_dir = "cache"\n'
    )
    prepare = Forked(cli.main, ["prepare", "a.toml"], cwd=tmp_path)
    out, err = prepare.communicate()
    assert (prepare.process.exitcode, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("preparing dataset 'files' in ") and lines[3] == "prepared dataset 'files'"
    assert "tokens" in "".join(lines[4:]) and "train" in "".join(lines[4:]) and "\x1b" not in out
    assert (tmp_path / "cache").is_dir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mxtrain.cli.quiet.hide_library_warnings", lambda: None)
    assert cli.main(["prepare", "a.toml", "--training.dataset_path", "gone.txt"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("mxtrain: error: training.dataset_path")


def test_plot_draws_into_the_runs_folder_and_prints_a_table(run_folder, capsys):
    assert cli.main(["plot", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert "5.0000" in out and str(run_folder / "loss.png") in out
    assert (run_folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_several_runs_goes_to_the_given_file(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot", str(run_folder), str(run_folder), "-o", "both.png"]) == 0
    assert (tmp_path / "both.png").exists() and not (tmp_path / "loss.png").exists()
    assert cli.main(["plot", str(run_folder), str(run_folder)]) == 0
    assert (tmp_path / "loss.png").exists() and not (run_folder / "loss.png").exists()


def test_plot_of_no_run_is_a_clean_error(tmp_path, capsys):
    assert cli.main(["plot", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("mxtrain: error: ")


def test_doctor_explains_the_norm_of_a_shape(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("mxtrain.cli.doctor.explain_norm", lambda *args: seen.append(args) or "because")
    assert cli.main(["doctor", "--explain-norm", "32768", "4096"]) == 0
    assert cli.main(["doctor", "--explain-norm", "8", "64", "--dtype", "float32"]) == 0
    assert seen == [(32768, 4096, "bfloat16"), (8, 64, "float32")]
    assert capsys.readouterr().out == "because\nbecause\n"


def test_doctor_explains_the_router_of_a_shape(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("mxtrain.cli.doctor.explain_router", lambda *args: seen.append(args) or "because")
    assert cli.main(["doctor", "--explain-router", "8192", "256", "7168"]) == 0
    assert cli.main(["doctor", "--explain-router", "8", "4", "64", "--dtype", "float32"]) == 0
    assert seen == [(8192, 256, 7168, "bfloat16"), (8, 4, 64, "float32")]
    assert capsys.readouterr().out == "because\nbecause\n"


SHAPES = "--explain-norm M N or --explain-router TOKENS EXPERTS HIDDEN"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "float32"], f"--dtype goes with {SHAPES}"),
        (
            ["--explain-norm", "8", "64", "--explain-router", "8", "4", "64"],
            "--explain-norm and --explain-router: ask for one at a time",
        ),
    ],
)
def test_doctor_flags_that_do_not_go_together(flags, message, capsys):
    assert cli.main(["doctor", *flags]) == 2
    assert capsys.readouterr().err == f"mxtrain: error: {message}\n"


def test_an_interrupt_prints_one_line(monkeypatch, capsys):
    def interrupted(config, flags, others):
        raise KeyboardInterrupt

    monkeypatch.setattr("mxtrain.cli.launch.train", interrupted)
    assert cli.main(["train", "a.toml"]) == 130
    assert capsys.readouterr().err == "mxtrain: stopped by SIGINT\n"
