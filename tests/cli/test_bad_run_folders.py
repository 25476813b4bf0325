"""Folders and files that a run or a plot must refuse: one line, exit status 2, and nothing changes on the disk."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mxtrain import cli
from mxtrain.checkpoints.folder import MANIFEST_FILE, Manifest, write_manifest
from mxtrain.cli import launch
from mxtrain.files import FileRecord
from mxtrain.settings.read import read_settings

ROW = json.dumps({"step": 1, "loss": 9.0}) + "\n"


@dataclass
class Case:
    flags: str
    message: str
    """How the line begins, after its prefix"""
    files: dict[str, str] = field(default_factory=dict)
    ngpu: str = ""


def saved(
    *steps: int, holds_trainer: bool = True, folder: str = "run/checkpoint/step-{}", settings: dict | None = None
) -> dict[str, str]:
    """Whole checkpoints, each with a file of three bytes."""
    files = {}
    for step in steps:
        manifest = Manifest(step, holds_trainer, {"a": FileRecord(3, "?")}, settings or {})
        with TemporaryDirectory() as temporary:
            write_manifest(Path(temporary), manifest)
            files[f"{folder.format(step)}/{MANIFEST_FILE}"] = Path(temporary, MANIFEST_FILE).read_text()
        files[f"{folder.format(step)}/a"] = "123"
    return files


def weights(step: int) -> dict[str, str]:
    return saved(step, holds_trainer=False)


METRICS = {"run/metrics.jsonl": ROW}
PART = {"run/checkpoint/step-20/__0_0.distcp": ""}
TORN = saved(20) | {"run/checkpoint/step-20/a": "12"}
RUN, SAVES = "--job.dump_folder=run", "--job.dump_folder=run --checkpoint.enable"
NEW, SEED = "--job.dump_folder=new --checkpoint.enable", "--checkpoint.create_seed_checkpoint"
REPLACES = "job.dump_folder = 'run' holds the metrics of a run in metrics.jsonl, which this run would replace"
AT_STEP_1 = f"{REPLACES} (with the weights in run/checkpoint/step-{{}} training starts at step 1); choose another"
IN = "checkpoint.initial_load_path = "

TRAIN = {
    # Metrics that would be replaced.
    "a finished run": Case(RUN, f"{REPLACES} (checkpoint.enable is False); choose another folder", METRICS),
    "weights without the step": Case(
        f"{SAVES} --checkpoint.exclude_from_loading=lr_scheduler,train_state", AT_STEP_1.format(10), METRICS | saved(10)
    ),
    "a seed over a run": Case(f"{SAVES} {SEED}", f"{REPLACES} (a seed is where a run starts)", METRICS),
    # Checkpoints that would not be loaded.
    "checkpoints are off": Case(
        RUN, "checkpoint.enable = False, but run/checkpoint holds step-10; set only checkpoint.enable to resume",
        METRICS | saved(5, 10),
    ),
    "only parts of checkpoints": Case(
        SAVES, "checkpoint.folder: run/checkpoint holds no whole checkpoint (step-10: a is missing; step-20: manifest.",
        METRICS | PART | {name: text for name, text in saved(10).items() if name.endswith("json")},
    ),
    "a step that was not saved": Case(
        f"{SAVES} --checkpoint.load_step=7", "checkpoint.load_step = 7 is not among the steps in run/checkpoint; choo",
        METRICS | saved(10, 5) | PART,
    ),
    "no folder of checkpoints": Case(
        SAVES, "job.dump_folder = 'run' cannot be read: run/checkpoint: Not a directory", {"run/checkpoint": ""}
    ),
    # Weights that cannot be loaded.
    "the folder of all checkpoints as initial weights": Case(
        f"{NEW} --checkpoint.initial_load_path=run/checkpoint",
        f"{IN}'run/checkpoint' cannot be loaded: manifest.json is missing; name the folder of one step",
        saved(5),
    ),
    "damaged initial weights": Case(
        f"{NEW} --checkpoint.initial_load_path=run/checkpoint/step-20",
        f"{IN}'run/checkpoint/step-20' cannot be loaded: a has 2 bytes instead of 3", TORN,
    ),
    "a second seed": Case(f"{SAVES} {SEED}", f"{SEED[2:]}, but run/checkpoint holds step-0; set", weights(0)),
    "a seed of two processes": Case(f"--checkpoint.enable {SEED}", f"{SEED[2:]} needs one process, not 2", ngpu="2"),
    "nothing to load": Case(f"{SAVES} --checkpoint.load_only", "checkpoint.load_only: run/checkpoint holds no check"),
    # Folders that are none.
    "an empty name": Case("--job.dump_folder=", "job.dump_folder = '' is not the name of a folder"),
    "not writable": Case(
        "--job.dump_folder=/proc/self", "job.dump_folder = '/proc/self' cannot be written: /proc/self/.lock: No such"
    ),
}  # fmt: skip

OWN_CONFIG = "[checkpoint]\nenable = true\n[mxnorm]\np = 1\n[debug]\nseed = 3\n"
FINISHED = METRICS | saved(5, 10, settings={"mxnorm": {"p": 1}, "debug": {"seed": 3}}) | {"run/config.toml": OWN_CONFIG}
ALREADY = "is already set by --resume run; leave the flag out"
TO_RESUME = "holds no checkpoint to resume from; start again, in a new folder, with 'mxtrain train run/config.toml --ch"

RESUME = {
    "no folder": Case("--resume runn", "--resume 'runn' does not exist; did you mean 'run'?", METRICS),
    "no run": Case("--resume run", "--resume 'run' holds no config.toml; name the folder of a run, such as", METRICS),
    "no name": Case("--resume", "--resume needs the folder of a run; write --resume outputs/NAME", FINISHED),
    "a run and a config's flag": Case(
        "--resume run --job.config_file=job.toml", f"job.config_file {ALREADY}", FINISHED
    ),
    "a run that saved nothing": Case(
        "--resume run", f"checkpoint.enable = False, so run/checkpoint {TO_RESUME}", METRICS | {"run/config.toml": ""}
    ),
    "a run whose checkpoints are gone": Case(
        "--resume run", f"checkpoint.interval = 500: run/checkpoint {TO_RESUME}",
        {"run/metrics.jsonl": ROW + ROW.replace("1", "600", 1), "run/config.toml": OWN_CONFIG},
    ),
    "another p": Case(
        "--resume run --mxnorm.p=2", "mxnorm.p = 2, but run/checkpoint/step-10 was trained with 1; set", FINISHED
    ),
    "a config that is not the run's own": Case(
        f"job.toml {SAVES} --mxnorm.p=1", "debug.seed = None, but run/checkpoint/step-10 was trained with 3", FINISHED
    ),
}  # fmt: skip


def make(files: dict[str, str]) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)


def written(folder: Path) -> dict[str, bytes | None]:
    """Content of every file and None for every folder, without the lock that a run leaves."""
    paths = sorted(folder.rglob("*"))
    return {str(p): p.read_bytes() if p.is_file() else None for p in paths if p.name != ".lock"}


def require_refusal(case: Case, command: str, capsys) -> None:
    make(case.files)
    before = written(Path("."))
    assert cli.main([*command.split(), *case.flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mxtrain: error: {case.message}")
    assert written(Path(".")) == before


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """No worker starts; a config in an empty folder. Returns what the launcher would have started."""
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NGPU", raising=False)
    monkeypatch.setattr(launch, "accelerator_count", lambda: 0)
    monkeypatch.setattr(launch, "run_workers", lambda arguments, *_: started.append(arguments) or 0)
    (tmp_path / "job.toml").write_text("")
    return started


@pytest.mark.parametrize("name", TRAIN)
def test_a_run_that_is_refused(name, launcher, monkeypatch, capsys):
    monkeypatch.setenv("NGPU", TRAIN[name].ngpu)
    Path("outputs").mkdir()
    require_refusal(TRAIN[name], "train job.toml", capsys)
    assert launcher == []


@pytest.mark.parametrize("name", RESUME)
def test_a_resume_that_is_refused(name, launcher, monkeypatch, capsys):
    monkeypatch.setenv("NGPU", RESUME[name].ngpu)
    require_refusal(RESUME[name], "train", capsys)
    assert launcher == []


ALLOWED = {
    "a new folder": (RUN, {}),
    "a resumed run": (SAVES, METRICS | saved(10)),
    "a run that was killed early": (SAVES, METRICS | {"run/config.toml": OWN_CONFIG}),
    "initial weights after a kill": (
        f"{SAVES} --checkpoint.initial_load_path=w", {"run/checkpoint/.saving/a": "", "w/.metadata": ""}
    ),
    "a seed to make": (f"{SAVES} {SEED}", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_a_run_that_may_start(name, launcher):
    flags, files = ALLOWED[name]
    make(files)
    assert cli.main(["train", "job.toml", *flags.split()]) == 0
    assert launcher[0][: len(flags.split()) + 1] == ["--job.config_file=job.toml", *flags.split()]


@pytest.mark.parametrize("words", [["--resume", "run"], ["--resume=run"], ["--verbose", "--resume", "run"]])
def test_a_run_that_may_resume(words, launcher):
    make(FINISHED)
    flags = ["--optimizer.lr", "1e-4", "--mxnorm.p=2", "--checkpoint.may_change=mxnorm.p"]
    assert cli.main(["train", *words, *flags]) == 0
    (arguments,) = launcher
    settings = read_settings([word for word in arguments if word != "--verbose"])
    assert settings["job.dump_folder"] == "run" and settings["checkpoint.enable"]
    assert [settings[name] for name in ("optimizer.lr", "mxnorm.p", "debug.seed")] == [1e-4, 2, 3]
    assert ("--verbose" in arguments) == ("--verbose" in words)


def test_a_run_in_the_folder_of_another(launcher, capsys):
    with launch.locked(Path("run")):
        assert cli.main(["train", "job.toml", RUN]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mxtrain: error: job.dump_folder = 'run' is in use by process ")
    assert cli.main(["train", "job.toml", RUN]) == 0  # the lock is free again
    assert len(launcher) == 1


def test_a_folder_in_the_users_home(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cli.main(["train", "job.toml", "--job.dump_folder=~/run"]) == 0
    assert launcher[0][-2:] == ["--job.dump_folder", str(tmp_path / "home" / "run")]
    assert not Path("~").exists()
