"""``mxtrain compare`` with a stand-in for ``mxtrain train``, and once with the real one."""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from mxtrain import cli
from mxtrain.analysis import comparison_figures, load_run
from mxtrain.checkpoints.run_folder import locked
from mxtrain.cli import compare_command, launch
from mxtrain.cli.compare_command import Run, planned, read_all, variant_of
from mxtrain.errors import ConfigError
from tests.support.forked import Forked, forking_context

STAND_IN = """
import json, os, pathlib, signal, sys, time

arguments = sys.argv[1:]
value = lambda name: next(a.partition("=")[2] for a in arguments if a.startswith(name + "="))
folder, seed = pathlib.Path(value("--job.dump_folder")), int(value("--debug.seed"))
kind = value("--job.description")
seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "NGPU", "OMP_NUM_THREADS")}
with open(folder.parent / "starts.jsonl", "a") as file:
    file.write(json.dumps({"run": folder.name, **seen}) + "\\n")
folder.mkdir(exist_ok=True)
if kind == "wait":
    from mxtrain.launched import end_with_comparison  # as the real command does
    end_with_comparison()
    signal.signal(signal.SIGINT, lambda *a: (time.sleep(0.5), print("stopped", flush=True), os._exit(130)))
(folder / "config.toml").write_text(f"[training]\\nsteps = 1\\n[debug]\\nseed = {seed}\\n")
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0 - seed}) + "\\n")
if kind == "wait":
    time.sleep(60)
if kind == "crash" and seed == 1 and not (folder.parent / "mended").exists():
    print("RuntimeError: out of memory\\nmxtrain: training failed: the worker ended with exit status 1")
    sys.exit(1)
end = time.monotonic() + 60  # two runs at a time: each waits for the other
while kind == "two" and (folder.parent / "starts.jsonl").read_text().count("run") < 2:
    if time.monotonic() > end:
        sys.exit(1)
    time.sleep(0.02)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Start the stand-in instead of ``mxtrain train``, on a machine without GPUs; the current folder is empty."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(compare_command, "TRAIN", [sys.executable, "-S", str(tmp_path / "stand_in.py")])
    monkeypatch.setattr(launch, "accelerator_count", lambda: 0)
    # Drawing is slow, and tested elsewhere.
    monkeypatch.setattr(comparison_figures, "differences_svg", lambda group: "")
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    # The stand-in writes other settings than the variants have.
    monkeypatch.setattr(compare_command, "require_same_settings", lambda *_: None)
    return tmp_path / "c"


def compare(*words, kind="train"):
    return cli.main(["compare", *words, f"--job.description={kind}", "-o", "c"])


def starts(folder):
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


def test_finished_runs_stay_and_more_seeds_come_to_them(stand_in, capfd):
    variants = ("llama3_debug", "p1=llama3_debug --mxnorm.p 1")
    assert compare(*variants) == 0
    assert compare(*variants, "--seeds", "2", "--devices", "2") == 0
    assert [start["run"] for start in starts(stand_in)] == [
        "llama3_debug-seed0", "p1-seed0", "llama3_debug-seed1", "p1-seed1"
    ]  # fmt: skip
    assert [start["NGPU"] for start in starts(stand_in)] == ["1", "1", "2", "2"]
    assert re.search(r"\| llama3_debug +\| 0.0008 +\| +2 \|", (stand_in / "comparison.md").read_text())
    out, err = capfd.readouterr()
    assert "p1-seed1: finished after 0.0 min; 4 of 4" in out and err == ""
    shutil.rmtree(stand_in / "p1-seed0")
    assert compare(*variants) == 0 and [start["run"] for start in starts(stand_in)[4:]] == ["p1-seed0"], "removed"
    (other,) = {row["name"] for row in json.loads((stand_in / "comparison.json").read_text())} - {
        "llama3_debug-seed0", "p1-seed0", "p1-seed1"
    }  # fmt: skip
    assert other == "llama3_debug-seed1", "runs of earlier commands stay finished"


def test_a_log_that_cannot_be_written_fails_its_run_and_an_old_figure_goes(stand_in, capfd):
    (stand_in / "llama3_debug-seed0.log").mkdir(parents=True)
    (stand_in / "differences_1.svg").touch()
    assert compare("llama3_debug", "p1=llama3_debug --mxnorm.p 1") == 1
    out, err = capfd.readouterr()
    assert "llama3_debug-seed0: FAILED: c/llama3_debug-seed0.log: Is a directory" in out
    assert "p1-seed0: finished" in out and out.endswith("mxtrain: comparison.md in c\n")
    assert "1 of 2 runs are not finished: llama3_debug-seed0" in err
    assert "no run of the baseline 'llama3_debug' counts here: differences are to 'p1'" in out
    assert not (stand_in / "differences_1.svg").exists()


def test_a_finished_run_of_other_settings_is_refused_and_free_ones_may_change(stand_in, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.chdir(stand_in.parent)
    monkeypatch.setattr(launch, "accelerator_count", lambda: 0)
    folder = stand_in / "a-seed0"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[training]\nsteps = 3\n[metrics]\nlog_freq = 1\n[debug]\nseed = 0\n")
    (stand_in / "comparison.json").write_text(json.dumps([{"name": "a-seed0", "status": 0}]))
    Path("a.toml").write_text("[training]\nsteps = 3\n[metrics]\nlog_freq = 2\n")
    assert compare("a.toml", "--dry-run") == 0 and "a-seed0: finished\n" in capsys.readouterr().out
    assert compare("a.toml", "--steps=4", "--dry-run") == 2
    problem = "training.steps = 4, but the run in c/a-seed0 has 3; choose another --output"
    assert capsys.readouterr().err == f"mxtrain: error: {problem}\n"
    # A run of an earlier version, with another rule for scales.
    Path("b.toml").write_text('extends = "a.toml"\nmodel.converters = ["mxnorm"]\n')
    shutil.copytree(folder, stand_in / "b-seed0")
    (stand_in / "b-seed0" / "run.json").write_text('{"versions": {"mxtrain": "0.1.0"}}')
    with (stand_in / "b-seed0" / "config.toml").open("a") as file:
        file.write('[model]\nconverters = ["mxnorm"]\n')
    (stand_in / "comparison.json").write_text(json.dumps([{"name": "b-seed0", "status": 0}]))
    assert compare("b.toml", "--dry-run") == 2
    problem = "mxnorm.scale_rounding = None, but the run in c/b-seed0 has 'rceil_0_18'"
    assert problem in capsys.readouterr().err


def test_a_failed_seed_is_reported_the_rest_goes_on_and_it_starts_again(stand_in, capfd):
    assert compare("llama3_debug", "--seeds", "3", kind="crash") == 1
    out, err = capfd.readouterr()
    why = "mxtrain: training failed: the worker ended with exit status 1"
    assert f"llama3_debug-seed1: FAILED after 0.0 min with exit status 1: {why}\n" in out
    assert "1 of 3 runs are not finished: llama3_debug-seed1" in err and "the same command with -o c goes on" in err
    (stand_in / "mended").touch()
    assert compare("llama3_debug", "--seeds", "3", kind="crash") == 0
    assert [start["run"][-1] for start in starts(stand_in)] == ["0", "1", "2", "1"]


def test_every_share_of_the_machine_does_one_run_at_a_time(stand_in, monkeypatch, capfd):
    monkeypatch.setattr(launch, "accelerator_count", lambda: 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    assert compare("llama3_debug", "--seeds=2", "--devices=2", "--compile.no-enable", kind="two") == 0
    seen = {(s["CUDA_VISIBLE_DEVICES"], s["NGPU"], s["OMP_NUM_THREADS"]) for s in starts(stand_in)}
    assert seen == {("0,1", "2", "3"), ("2,3", "2", "3")}
    assert "2 runs in c, 2 at a time" in capfd.readouterr().out


@pytest.mark.parametrize(
    "visible, devices, expected",
    [
        (None, 1, ["0", "1", "2", "3"]), ("4,5,6,7", 2, ["4,5", "6,7"]), (None, 3, ["0,1,2"]),
        (None, 5, "--devices 5 is too many for the GPUs of this machine; allowed is 1 to 4"),
    ],
)  # fmt: skip
def test_every_run_gets_gpus_of_its_own(monkeypatch, visible, devices, expected):
    monkeypatch.setattr(launch, "accelerator_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            compare_command.device_shares(devices)
    else:
        assert compare_command.device_shares(devices) == expected


def _compare_in_a_terminal(folder, train):
    """In a process group of its own, as a shell's job: a run that waits to be stopped."""
    os.setpgrp()
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    os.environ["PYTHONPATH"] = str(Path(cli.__file__).parents[2])
    compare_command.TRAIN, comparison_figures.differences_svg = train, lambda group: ""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    sys.exit(compare("llama3_debug", "--seeds=2", kind="wait"))


@pytest.mark.parametrize("killed", [False, True])
def test_ctrl_c_stops_all_runs_and_says_how_to_go_on(stand_in, killed, tmp_path):
    process = forking_context().Process(target=_compare_in_a_terminal, args=(tmp_path, compare_command.TRAIN))
    process.start()
    end = time.monotonic() + 60
    while not list(stand_in.glob("*/metrics.jsonl")):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL) if killed else os.killpg(process.pid, signal.SIGINT)
    process.join(30)
    if killed:
        workers = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_of(path, stand_in)]
        time.sleep(0.5)
        assert not [path for path in workers if _is_of(path, stand_in)], "runs end with the command"
        return
    output = (tmp_path / "output").read_text()
    assert process.exitcode == 130, output
    assert len(starts(stand_in)) == 1, "no other run begins"
    assert "2 of 2 runs are not finished" in output and "the same command with -o c goes on" in output
    assert (stand_in / "llama3_debug-seed0.log").read_text() == "stopped\n", "the run was waited for"


def _is_of(cmdline: Path, folder: Path) -> bool:
    try:
        return str(folder.parent / "stand_in.py").encode() in cmdline.read_bytes() and b"wait" in cmdline.read_bytes()
    except OSError:
        return False


def test_two_commands_do_not_work_in_one_folder(stand_in, capfd):
    with locked(stand_in):
        assert compare("llama3_debug") == 2
    assert f"--output = 'c' is in use by process {os.getpid()}" in capfd.readouterr().err


def test_a_dry_run_shows_the_commands_and_leaves_nothing(stand_in, capsys):
    assert compare("llama3_debug", "--lr", "3.0000001e-4,0.001", "--steps", "7", "--dry-run") == 0
    out = capsys.readouterr().out.splitlines()
    flags = "--job.description=train --training.steps=7 --optimizer.lr=0.00030000001 --debug.seed=0"
    assert out[:2] == [
        "mxtrain: 2 runs in c",
        f"llama3_debug-lr0.00030000001-seed0: mxtrain train llama3_debug {flags}",
    ]
    assert compare("llama3_125m", "--dry-run") == 0, "a plan for a machine with GPUs, which torch.compile needs"
    assert not stand_in.exists()


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--seeds", "2"], "VARIANT is missing; name configs, or write --from and a CSV of results"),
        (["--from", "a.csv", "b", "--x"], "--from a.csv trains nothing; leave out b --x"),
        (["llama3_debug", "--baseline", "p1"], "--baseline 'p1' is not one of the variants: llama3_debug"),
        (
            ["llama3_debug", "--training.step=3"],
            "llama3_debug-seed0: training.step is not a setting; did you mean training.steps?",
        ),
        (
            ["llama3_debug", "b=llama3_debug --parallelism.tensor_parallel_degree=3", "--devices=2"],
            "b-seed0: parallelism.tensor_parallel_degree = 3 does not fit 2 process(es): the product",
        ),
        (["llama3_debug --training.dataset=files --training.dataset_path=gone"], "llama3_debug-training.dataset-files"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(stand_in, capsys, words, problem):
    assert cli.main(["compare", *words]) == 2
    assert capsys.readouterr().err.startswith(f"mxtrain: error: {problem}")
    assert [path.name for path in stand_in.parent.iterdir()] == ["stand_in.py"]


@pytest.mark.parametrize(
    "words, expected",
    [
        ("llama3_debug", ("llama3_debug", "llama3_debug", [])),
        ("p1=llama3_debug --mxnorm.p 1", ("p1", "llama3_debug", ["--mxnorm.p", "1"])),
        ("a/b.toml --mxnorm.p=1", ("b-mxnorm.p-1", "a/b.toml", ["--mxnorm.p=1"])),
        ("outputs/mine/config.toml", ("mine", "outputs/mine/config.toml", [])),
        ("out/lr=3/x.toml", ("x", "out/lr=3/x.toml", [])),
        ("lr=3.toml", ("lr-3", "lr=3.toml", [])),  # the name of a file that is there
    ],
)
def test_a_variant_is_a_config_with_a_name_and_flags(words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=3.toml").touch()
    assert variant_of(words) == expected


def test_every_variant_gets_every_rate_and_seed_and_the_variants_flags_come_last():
    runs = planned(["a=llama3_debug --mxnorm.p 1", "llama3_debug_bf16"], 2, ["0.001"], ["--mxnorm.p", "2"])
    assert list(runs) == [
        "a-lr0.001-seed0", "llama3_debug_bf16-lr0.001-seed0", "a-lr0.001-seed1", "llama3_debug_bf16-lr0.001-seed1",
    ]  # fmt: skip
    flags = ["--mxnorm.p", "2", "--mxnorm.p", "1", "--optimizer.lr=0.001", "--debug.seed=1"]
    assert runs["a-lr0.001-seed1"] == Run("a", ["llama3_debug", *flags])
    assert list(planned(["llama3_debug"], 1, [], [])) == ["llama3_debug-seed0"]


@pytest.mark.parametrize(
    "variants, rates, flags, problem",
    [
        (["'llama3_debug"], [], [], "VARIANT = .* cannot be split into words: No closing quotation"),
        (["a=--x"], [], [], "VARIANT = 'a=--x' names no config"),
        (["llama3_debug", "llama3_debug"], [], [], "two runs have the name 'llama3_debug-seed0'; write NAME=CONFIG"),
        (["llama3_debug --debug.seed 1"], [], [], "--debug.seed is set by 'mxtrain compare' for every run"),
        (["llama3_debug"], ["1"], ["--optimizer.lr=1"], "--optimizer.lr is set by 'mxtrain compare'"),
        (["llama3_debug", "b=llama3_debug --mxnorm.p 3"], [], [], "mxnorm.p = "),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_any_run(variants, rates, flags, problem):
    with pytest.raises(ConfigError, match=problem):
        read_all(planned(variants, 1, rates, flags))


@pytest.mark.sweep
def test_two_variants_from_start_to_figure(tmp_path):
    """The first-step losses of two variants that differ in the kernels of a high-precision norm are equal."""
    sizes = ["--training.seq_len=32", "--training.local_batch_size=2", "--data.max_bytes=100000"]
    quiet = ["--validation.no-enable", "--metrics.no-enable_wandb", "--metrics.log_freq=1"]
    words = ["compare", "llama3_debug_bf16", "fused=llama3_debug_fused_rmsnorm", "--steps=1", *sizes, *quiet, "-o", "c"]
    for _ in range(2):
        compared = Forked(cli.main, words, cwd=tmp_path)
        out, err = compared.communicate(300)
        assert compared.process.exitcode == 0, err
    assert out.count(": starts") == 2, "finished runs stay: this is the output of both commands"
    losses = [load_run(tmp_path / "c" / f"{name}-seed0").first_loss for name in ("llama3_debug_bf16", "fused")]
    assert losses[1] == pytest.approx(losses[0], rel=3e-7)  # two units in the last place of an fp32 sum
    assert "fused" in (tmp_path / "c" / "comparison.md").read_text()
    assert "minus that of llama3_debug_bf16" in (tmp_path / "c" / "differences.svg").read_text()
