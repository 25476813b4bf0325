"""A user's own project: the files of train_configs/CUSTOM.md, trained as a user trains them."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli

from mxtrain import cli
from mxtrain.analysis import load_run
from mxtrain.errors import ConfigError
from mxtrain.settings.read import import_own, search_beside
from tests.support.forked import Forked
from tests.support.releases import only_022
from tests.support.training_runs import wait_for_lines

ROOT = Path(__file__).parents[2]
TINY = [
    "--job.dump_folder=my run", "--checkpoint.enable", "--metrics.log_freq=1", "--metrics.no-enable_wandb",
    "--training.steps=1000000", "--training.seq_len=32", "--training.local_batch_size=2",
]  # fmt: skip


@pytest.fixture
def project(tmp_path):
    """The files of the document in one folder, and their text in another, which is the current folder of the runs."""
    document = (ROOT / "train_configs" / "CUSTOM.md").read_text()
    blocks = re.findall(r"`([\w.]+)`[^`]*^```(?:python|toml)\n(.*?)^```$", document, flags=re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["files.toml", "my_project.py", "my.toml"]
    (tmp_path / "project").mkdir()
    for name, block in blocks:
        (tmp_path / "project" / name).write_text(block)
    stories = (
        {"story": f"Once upon a time, number {i} met number {i * i}. They talked until noon."} for i in range(300)
    )
    (tmp_path / "stories.jsonl").write_text("".join(json.dumps(story) + "\n" for story in stories))
    return tmp_path


@only_022
@pytest.mark.sweep
def test_a_project_beside_its_config_trains_until_an_interrupt_of_the_terminal_saves_and_stops_it(project):
    training, run = Forked(cli.main, ["train", "project/my.toml", *TINY], cwd=project, NGPU="1"), project / "my run"
    wait_for_lines(run / "metrics.jsonl", 3)
    os.killpg(training.process.pid, signal.SIGINT)  # the workers are in groups of their own
    out, err = training.communicate()
    assert training.process.exitcode == 128 + signal.SIGINT
    assert err == "mxtrain: SIGINT: stopping; a second SIGINT kills the workers\n"
    step = load_run(run).training[-1]["step"]
    line = f"stopped by SIGINT after step {step}, which is saved; resume with: mxtrain train --resume 'my run'"
    assert out.splitlines().count(line) == out.count("stopped by") == out.count("loss curve") == 1, "one summary"
    assert [path.name for path in (run / "checkpoint").iterdir()] == [f"step-{step}"]
    facts = json.loads((run / "run.json").read_text())
    assert (facts["model"], facts["flavor"]) == ("my_llama", "narrow")
    assert facts["converters"] == ["mxnorm", "frozen_embedding"]
    assert "mxnorm" in (run / "conversion.txt").read_text()
    config = tomli.loads((run / "config.toml").read_text())
    assert config["experimental"] == {"custom_import": "my_project"} and config["training"]["dataset"] == "stories"


def test_a_file_of_text_is_prepared_with_the_settings_of_the_document(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    monkeypatch.setenv("MXTRAIN_CACHE", str(project / "cache"))
    assert cli.main(["prepare", "project/files.toml"]) == 0, capsys.readouterr().err
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"vocab size 512", "documents 300", "validation documents 19"} <= set(rows)
    (tokenizer,) = (project / "cache").glob("*/tokenizer")
    np.arange(2000, dtype="<u2").clip(max=511).tofile("ids.bin")
    own = ["--training.dataset_path=ids.bin", f"--model.hf_assets_path={tokenizer}"]
    assert cli.main(["prepare", "project/files.toml", *own]) == 0, capsys.readouterr().err
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"train tokens 1,900", "validation tokens 100", "separators is tokenized already"} <= set(rows)


@only_022
def test_a_flavor_of_a_users_own_in_a_model_of_mxtrain(project):
    arguments = ["train", "project/my.toml", "--model.name=llama3", "--model.converters=mxnorm,frozen_embeding"]
    mistake = Forked(cli.main, arguments, cwd=project)
    _, err = mistake.communicate()
    # The flavor is checked before the converters, so it is known.
    assert mistake.process.exitcode == 2
    (line,) = err.splitlines()
    assert line.startswith("mxtrain: error: model.converters = 'frozen_embeding' is not one of: ")
    assert "'mxnorm'" in line and "'frozen_embedding'" in line and not line.endswith(")")
    assert not any((project / "outputs").glob("*"))


def test_a_module_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for _ in range(2):
        search_beside(str(tmp_path / "my.toml"))
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1, "what is installed comes first"
    for number, (code, message) in enumerate(
        (
            ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (.*, line 1)"),
            ("\n1 / 0", "ZeroDivisionError: division by zero (.*my_broken_1.py, line 2)"),
            ("x = = 1", "SyntaxError: invalid syntax"),
        )
    ):
        (tmp_path / f"my_broken_{number}.py").write_text(code)
        with pytest.raises(ConfigError) as error:
            import_own("experimental.custom_import", f"my_broken_{number}")
        pattern = message.replace("(", r"\(").replace(")", r"\)")
        wanted = f"experimental.custom_import = 'my_broken_{number}' cannot be imported: {pattern}"
        assert re.match(wanted, str(error.value)) and "\n" not in str(error.value), error.value


@pytest.mark.parametrize("setting", ["job.custom_config_module", "experimental.custom_import"])
def test_every_command_finds_the_module_beside_its_config(tmp_path, monkeypatch, capsys, setting):
    section, name = setting.split(".")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"beside_{name}.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass\nclass JobConfig:\n    pass\n"
    )
    config = tmp_path / "my.toml"
    config.write_text(f'extends = "llama3_debug"\n[{section}]\n{name} = "beside_{name}"\n')
    assert cli.main(["doctor", "--model", str(config)]) == 0, capsys.readouterr().err
    assert f"beside_{name}" in sys.modules
