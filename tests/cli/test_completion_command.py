"""The completion script, in bash as a user has it: what the Tab key offers."""

import io
import re
import subprocess
from contextlib import redirect_stdout

import pytest

from mxtrain import cli
from mxtrain.config import presets
from mxtrain.settings.known import known_fields


@pytest.fixture(scope="module")
def script():
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert cli.main(["completion", "bash"]) == 0
    return printed.getvalue()


@pytest.fixture
def offered(script, tmp_path):
    def offered(*words):
        """What Tab offers after ``words``, the last of which is being written."""
        line = " ".join(f"'{word}'" for word in ("mxtrain", *words))
        code = f'{script}\nCOMP_WORDS=({line}) COMP_CWORD={len(words)}\n_mxtrain\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
        result = subprocess.run(["bash", "-uc", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, ""), result.stderr
        return [word for word in result.stdout.split("\n") if word]

    return offered


def test_commands(offered):
    assert {"train", "prepare", "configs", "init", "doctor", "completion"} <= set(offered(""))
    assert offered("tr") == ["train"] and offered("nothing") == []


def test_settings_and_options(offered):
    flags = offered("train", "my.toml", "--")
    assert {f"--{name}" for name in known_fields()} | {"--resume", "--verbose", "--help"} <= set(flags)
    assert offered("train", "my.toml", "--mxnorm.est") == ["--mxnorm.estimator"]
    assert "--checkpoint.no_enable" in offered("prepare", "--checkpoint.no_en")
    assert offered("plot", "--out") == ["--output"] and offered("plot", "--mxnorm") == []


def test_values_of_settings(offered):
    assert offered("train", "my.toml", "--mxnorm.estimator", "p") == ["pre_round", "post_round"]
    assert offered("train", "--mxnorm.p", "") == ["1", "2"]
    assert offered("completion", "") == ["bash", "zsh"]


def test_presets_and_files(offered, tmp_path):
    (tmp_path / "llama3_mine.toml").write_text("")
    assert offered("train", "llama3_debug_p") == ["llama3_debug_p1"]
    assert offered("train", "llama3_m") == ["llama3_mine.toml"]
    assert set(offered("init", "")) == {*presets(), "llama3_mine.toml"}
    assert offered("train", "my.toml", "--job.dump_folder", "lla") == ["llama3_mine.toml"]
    assert set(offered("doctor", "--model", "llama3_debug_p")) == {"llama3_debug_p1"}
    (tmp_path / "my run").mkdir()
    assert offered("plot", "my") == ["my run"]


def test_zsh_runs_the_same_functions(script, capsys):
    assert cli.main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("autoload ") and text.endswith(script) and text.count("bashcompinit") == 2
    # zsh reads $'...' as a quoted string outside of double quotes only.
    assert not [line for line in text.splitlines() if re.search(r"\"[^\"]*\$'[^\"]*\"", line)]


def test_bash_registers_the_function(script):
    code = f"{script}\ncomplete -p mxtrain"
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "complete -F _mxtrain mxtrain"
