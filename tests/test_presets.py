"""The presets: by name in any folder, and in a wheel that is installed away from the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import tomli

from mxtrain import cli
from mxtrain.config import config_path, find_setting, load_config, presets, summary
from mxtrain.errors import ConfigError
from tests.support.packages import copy_source, pip

ROOT = Path(__file__).parents[1]
FILES = {path.stem: path for path in (ROOT / "train_configs").glob("*.toml")}


def test_the_presets_are_the_files_of_train_configs():
    assert presets() == FILES and list(presets()) == sorted(FILES)


def test_a_name_is_a_file_if_there_is_one_and_else_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3_debug").mkdir()  # a folder is no config
    assert config_path("llama3_debug") == FILES["llama3_debug"]
    assert load_config("llama3_debug_p1")["mxnorm"]["p"] == 1
    (tmp_path / "llama3_1b").write_text("[training]\nsteps = 3\n")
    assert load_config("llama3_1b") == {"training": {"steps": 3}}


def test_a_config_extends_a_preset_and_mistakes_in_it_are_placed(tmp_path):
    (tmp_path / "my.toml").write_text('extends = "llama3_debug_p1"  # a preset\n[training]\nsteps = 7\n')
    config = load_config(tmp_path / "my.toml")
    assert (config["mxnorm"]["p"], config["training"]["steps"], config["model"]["name"]) == (1, 7, "llama3")
    file, line = find_setting("mxnorm.p", tmp_path / "my.toml")
    assert file == FILES["llama3_debug_p1"] and file.read_text().splitlines()[line - 1] == "p = 1"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama3_debug.toml", "did you mean 'llama3_debug'?"),
        ("lama3_debug", "did you mean 'llama3_debug'?"),
        ("configs/my_rnu.toml", "did you mean 'configs/my_run.toml'?"),
        ("x.toml", "'mxtrain configs' lists the presets"),
    ],
)
def test_a_config_that_does_not_exist(name, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/my_run.toml").touch()
    with pytest.raises(ConfigError) as error:
        load_config(name)
    assert str(error.value) == f"config {name!r} does not exist; {hint}"


def test_configs_lists_every_preset_with_a_sentence(capsys):
    assert cli.main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(FILES)
    for name, line in zip(sorted(FILES), lines, strict=True):
        sentence = summary(FILES[name])
        assert line.endswith(f"  {sentence}")
        assert sentence[0].isupper() and sentence.endswith(".") and len(sentence) > 20, name


@pytest.mark.parametrize("name", ["llama3_debug", "llama3_debug_mixed", "qwen3_debug"])
def test_init_copies_a_preset_with_its_comments(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", name, "my.toml"]) == cli.main(["init", name]) == 0
    assert "mxtrain train my.toml" in capsys.readouterr().out
    copy, original = (tmp_path / "my.toml").read_text(), FILES[name].read_text()
    assert load_config("my.toml") == load_config(f"{name}.toml") == load_config(FILES[name])
    changed = [pair for pair in zip(copy.splitlines(), original.splitlines(), strict=True) if pair[0] != pair[1]]
    assert changed == (
        [('extends = "llama3_debug"', 'extends = "llama3_debug.toml"')] if name != "llama3_debug" else []
    )
    assert cli.main(["init", name, "my.toml"]) == 2
    assert capsys.readouterr().err == "mxtrain: error: FILE = 'my.toml' cannot be written: File exists\n"


def test_init_copies_the_script_for_slurm(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "train.sbatch"]) == 0
    assert "start it with 'sbatch train.sbatch CONFIG'" in capsys.readouterr().out
    assert (tmp_path / "train.sbatch").read_bytes() == (ROOT / "train_configs" / "train.sbatch").read_bytes()


# A wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return copy_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory):
    """A folder with mxtrain, installed from a wheel."""
    built, target = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("target")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", built, source)
    (wheel,) = built.glob("mxtrain-*.whl")
    pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    return wheel, target


def run(code_or_module: list[str], cwd: Path, path: Path):
    environment = {**os.environ, "PYTHONPATH": str(path), "MXTRAIN_CACHE": str(cwd.parent / "cache"),
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, *code_or_module]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


def test_a_wheel_holds_all_packages_and_presets(installed):
    wheel, _ = installed
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"mxtrain/{path.relative_to(ROOT / 'mxtrain')}" for path in (ROOT / "mxtrain").rglob("*.py")}
    expected |= {f"mxtrain/train_configs/{path.name}" for path in FILES.values()}
    expected |= {"mxtrain/train_configs/train.sbatch", "mxtrain/py.typed", "mxtrain/diagnostics/certificate.json"}
    assert {name for name in names if ".dist-info/" not in name} == expected
    (metadata,) = [name for name in names if name.endswith("/METADATA")]
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    for line in (
        "License-Expression: BSD-3-Clause",
        "Classifier: Typing :: Typed",
        "Project-URL: Paper, https://arxiv",
    ):
        assert f"\n{line}" in text


def metadata(folder: Path, target: Path) -> str:
    code = "import sys; from setuptools.build_meta import prepare_metadata_for_build_wheel as p; p(sys.argv[1])"
    target.mkdir()
    subprocess.run([sys.executable, "-c", code, target], cwd=folder, check=True, capture_output=True)
    return next(target.glob("*.dist-info/METADATA")).read_text()


def test_links_of_a_package_lead_to_the_repository_that_it_was_built_from(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    subprocess.run(["git", "init", "-q", copy], check=True)
    subprocess.run(["git", "-C", copy, "remote", "add", "origin", "git@example.org:some/one.git"], check=True)
    text = metadata(copy, tmp_path / "checkout")
    for line in (
        "Project-URL: Paper, https://arxiv.org/abs/2603.13180\n",
        "Project-URL: Repository, https://example.org/some/one\n",
        "Project-URL: Changelog, https://example.org/some/one/blob/HEAD/CHANGELOG.md\n",
        "](https://example.org/some/one/raw/HEAD/scripts/evidence/llama3_125m/differences_2.svg)\n",
        "](https://example.org/some/one/blob/HEAD/train_configs/CHOOSING.md),",
        "[TorchTitan](https://github.com/pytorch/torchtitan)",
        "[Limits](#limits)",
    ):
        assert line in text
    # A source distribution has no Git, but these metadata.
    shutil.rmtree(copy / ".git")
    (copy / "PKG-INFO").write_text(text)
    assert metadata(copy, tmp_path / "sdist") == text


@pytest.mark.sweep
def test_a_preset_trains_from_an_empty_folder_with_an_installed_wheel(installed, tmp_path):
    _, target = installed
    empty = tmp_path / "empty"
    empty.mkdir()
    sizes = ["--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=2", "--data.vocab_size=300",
             "--data.max_bytes=300000", "--validation.no-enable", "--metrics.no-enable_wandb"]  # fmt: skip
    result = run(["-m", "mxtrain.cli", "train", "llama3_debug_p1", *sizes], empty, target)
    assert result.returncode == 0, result.stderr
    (folder,) = (empty / "outputs").iterdir()
    assert folder.name.startswith("llama3_debug_p1-")
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2] and tomli.loads((folder / "config.toml").read_text())["mxnorm"]["p"] == 1
    assert f"{target}/mxtrain" in run(["-c", "import mxtrain; print(mxtrain.__file__)"], empty, target).stdout


def test_an_editable_installation_finds_the_presets_of_its_checkout(source, tmp_path):
    pip("install", "-e", source, "--no-deps", "--no-build-isolation", "--no-index", "--target", tmp_path / "target")
    # Without site (-S), so that the tests' own installation, which may be editable, too, is not found.
    code = (
        f"import site, sys; site.addsitedir({str(tmp_path / 'target')!r}); "
        f"sys.path.append({sysconfig.get_paths()['purelib']!r}); "
        "from mxtrain.config import presets; print(presets()['llama3_debug'])"
    )
    result = run(["-S", "-c", code], tmp_path, tmp_path)
    assert result.stdout.strip() == str(source / "train_configs" / "llama3_debug.toml"), result.stderr
