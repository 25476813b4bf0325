"""``mxtrain compare`` with a stand-in for ``mxtrain train``, and once with the real one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mxtrain import cli
from mxtrain.analysis import load_run, report
from mxtrain.cli import compare_command, launch, side_by_side
from mxtrain.errors import ConfigError
from mxtrain.run_folder.comparison import PairedRun
from mxtrain.run_folder.lock import locked
from tests.support.forked import Forked, forking_context

STAND_IN = """
import json, os, pathlib, signal, sys, time

arguments = sys.argv[1:]
value = lambda name: next(a.partition("=")[2] for a in arguments if a.startswith(name + "="))
folder, seed = pathlib.Path(value("--job.dump_folder")), int(value("--debug.seed"))
kind = value("--job.description")
seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "NGPU", "OMP_NUM_THREADS")}
with open(folder.parent / "starts.jsonl", "a") as file:
    file.write(json.dumps({"run": folder.name, "directory": os.getcwd(), **seen}) + "\\n")
folder.mkdir(exist_ok=True)
loss = float("nan") if kind == "nan" and seed == 1 else 3.0 - seed
row = {"step": 1, "loss": None, "nonfinite": {"loss": "nan"}} if loss != loss else {"step": 1, "loss": loss}
if kind == "wait":
    from mxtrain.launched import end_with_comparison  # as the real command does
    end_with_comparison()
    signal.signal(signal.SIGINT, lambda *a: (print("stopped", flush=True), os._exit(130)))
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
    time.sleep(60)
if kind == "crash" and seed == 1 and not (folder.parent / "mended").exists():
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
    print("RuntimeError: out of memory\\nmxtrain: training failed: the worker ended with exit status 1")
    sys.exit(1)
if kind == "killed" and seed == 1:
    print("mxtrain: training failed: the worker ended with SIGKILL")
    sys.exit(1)
end = {"step": 1, "event": "weights are not finite"} if kind == "weights" and seed == 1 else None
(folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in (row, end) if r))
(folder / "config.toml").write_text(f"[training]\\nsteps = 1\\n[debug]\\nseed = {seed}\\n")
end = time.monotonic() + 60  # two runs at a time: each waits for the other
while seed == 1 and kind == "train" and (folder.parent / "starts.jsonl").read_text().count("seed1") < 2:
    if time.monotonic() > end:
        sys.exit(1)
    time.sleep(0.02)
sys.exit(1 if kind in ("nan", "weights") and seed == 1 else 0)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Start the stand-in instead of ``mxtrain train``, on a machine without GPUs; the current folder is empty."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(side_by_side, "TRAIN", [sys.executable, "-S", str(tmp_path / "stand_in.py")])
    monkeypatch.setattr(launch, "accelerator_count", lambda: 0)
    monkeypatch.setattr(report, "curves_svg", lambda group: "")  # drawing is slow, and tested elsewhere
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "c"


def compare(*words, kind="train"):
    return cli.main(["compare", *words, f"--job.description={kind}", "-o", "c"])


def starts(folder):
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


def test_finished_runs_stay_and_more_seeds_come_to_them(stand_in, capfd):
    assert compare("llama3_debug", "p1=llama3_debug --mxnorm.p 1") == 0
    assert (stand_in / "report.html").exists()
    assert compare("llama3_debug", "p1=llama3_debug --mxnorm.p 1", "--seeds", "2", "--side-by-side", "2") == 0
    assert [start["run"] for start in starts(stand_in)][:2] == ["llama3_debug-seed0", "p1-seed0"]
    later = starts(stand_in)[2:]
    assert sorted(start["run"] for start in later) == ["llama3_debug-seed1", "p1-seed1"]
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {(s["NGPU"], s["CUDA_VISIBLE_DEVICES"], s["OMP_NUM_THREADS"]) for s in later} == {("1", None, str(cores))}
    assert "| llama3_debug | 0.0008 | 2 |" in (stand_in / "report.md").read_text()
    out, err = capfd.readouterr()
    assert "p1-seed1: finished: loss 2.0000" in out and "4 of 4 finished" in out and err == ""
    assert compare("llama3_debug", kind="other") == 2
    assert "llama3_debug-seed0 was begun with other flags" in capfd.readouterr().err
    assert cli.main(["compare", "--resume", "c"]) == 0 and len(starts(stand_in)) == 4, "nothing is left to do"
    shutil.rmtree(stand_in / "p1-seed0")
    assert cli.main(["compare", "--resume", "c"]) == 0 and starts(stand_in)[4]["run"] == "p1-seed0", "it was removed"


NONFINITE = {"nan": "its loss is not finite at step 1", "weights": "its weights are not finite after step 1"}


@pytest.mark.parametrize("kind, problem", [("crash", "RuntimeError: out of memory"), *NONFINITE.items()])
def test_a_failed_seed_is_reported_the_rest_goes_on_and_it_starts_again(stand_in, capfd, kind, problem):
    assert compare("llama3_debug", "--seeds", "3", kind=kind) == 1
    out, err = capfd.readouterr()
    assert f"llama3_debug-seed1: FAILED after 0.0 min with exit status 1, and the rest goes on: {problem}" in out
    assert "1 of 3 runs are not finished: llama3_debug-seed1" in err and "mxtrain compare --resume c" in err
    assert (f"does not count: {problem}" in err) == (kind in NONFINITE)
    (stand_in / "mended").touch()
    if kind in NONFINITE:
        assert cli.main(["compare", "--resume", "c"]) == 1 and len(starts(stand_in)) == 3
        out = capfd.readouterr().out
        assert f"llama3_debug-seed1: FAILED before: {problem}" in out and "remove c/llama3_debug-seed1\n" in out
        return
    assert cli.main(["compare", "--resume", "c"]) == 0
    assert [start["run"][-1] for start in starts(stand_in)] == ["0", "1", "2", "1"]
    assert "starts again; its earlier files are in c/set_aside/llama3_debug-seed1-1" in capfd.readouterr().out
    assert (stand_in / "set_aside" / "llama3_debug-seed1-1" / "metrics.jsonl").exists()


def test_a_comparison_goes_on_with_the_gpus_that_it_was_begun_with(stand_in, capfd):
    assert compare("llama3_debug", "--seeds=2", "--gpus=2", kind="crash") == 1
    (stand_in / "mended").touch()
    assert cli.main(["compare", "--resume", "c"]) == 0
    assert compare("llama3_debug", "--seeds=3", kind="crash") == 0
    assert [start["NGPU"] for start in starts(stand_in)] == ["2"] * 4
    assert "training.global_batch_size" not in capfd.readouterr().err
    assert compare("llama3_debug", "--seeds=4", "--gpus=1", kind="crash") == 0
    assert starts(stand_in)[-1]["NGPU"] == "1"
    # The finished runs had twice as many sequences per step.
    assert "variants differ in training.global_batch_size (16 in llama3_debug, 8 in " in capfd.readouterr().err
    assert [run["gpus"] for run in json.loads((stand_in / "comparison.json").read_text())] == [2, 2, 2, 1]
    assert compare("llama3_debug", "--seeds=5", kind="crash") == 0 and starts(stand_in)[-1]["NGPU"] == "1"


def test_a_run_that_is_left_has_the_gpus_that_it_was_last_started_with(stand_in):
    assert compare("llama3_debug", "--seeds=3", "--gpus=2", kind="crash") == 1
    assert cli.main(["compare", "--resume", "c", "--gpus=1"]) == 1
    assert cli.main(["compare", "--resume", "c"]) == 1
    assert [(start["run"][-1], start["NGPU"]) for start in starts(stand_in)[3:]] == [("1", "1"), ("1", "1")]


@pytest.mark.parametrize("status, problem", [(1, "its loss is not finite at step 1"), (130, ""), (None, "")])
def test_only_a_run_that_failed_by_itself_is_not_started_again(tmp_path, status, problem):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null, "nonfinite": {"loss": "nan"}}\n')
    found = side_by_side.ended_nonfinite(tmp_path, PairedRun("a-seed0", "a", ["a"], "", status))
    assert found.startswith(problem) and bool(found) == bool(problem)
    (tmp_path / "config.toml").write_text('[metrics]\non_nonfinite_loss = "continue"\n')  # failed for another reason
    assert side_by_side.ended_nonfinite(tmp_path, PairedRun("a-seed0", "a", ["a"], "", status)) == ""


def test_a_run_gets_its_share_of_the_cores_and_a_signal_that_comes_while_it_is_started(tmp_path, monkeypatch):
    threads, sent = [], []

    def start(*_, env, **__):
        threads.append(env["OMP_NUM_THREADS"])
        return SimpleNamespace(send_signal=sent.append, wait=lambda: 130)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(side_by_side, "core_count", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = PairedRun("a-seed0", "a", ["llama3_debug"], "")
    runs = side_by_side.SideBySide(tmp_path, {run.name: run}, {}, [None] * 3, processes=2)
    runs.stopped_by = signal.SIGINT
    runs._do(run, None, "starts")
    assert (threads, sent) == (["2"], [signal.SIGINT])


def test_the_last_words_of_a_run_are_the_last_error_of_its_last_lines(tmp_path):
    log = tmp_path / "log"
    log.write_text("ValueError: long ago\n" + "a line\n" * 70 + "RuntimeError: now\nthe end\n")
    assert side_by_side._last_words(log, 0) == "RuntimeError: now"
    log.write_text("ValueError: long ago\n" + "a line\n" * 70 + "the end\n")
    assert side_by_side._last_words(log, 0) == "the end"
    log.write_text("mxtrain: error: of an earlier start\nthe end\n")
    assert side_by_side._last_words(log, 36) == "the end"


def test_a_comparison_is_resumed_where_its_configs_are_found(stand_in, tmp_path, monkeypatch, capfd):
    (tmp_path / "own.toml").write_text('extends = "llama3_debug"\n')
    assert compare("own.toml") == 0
    path, elsewhere = stand_in / "comparison.json", tmp_path / "elsewhere"
    path.write_text(path.read_text().replace('"status": 0', '"status": null'))
    elsewhere.mkdir()
    (elsewhere / "own.toml").write_text('extends = "llama3_debug_bf16"\n')
    monkeypatch.chdir(elsewhere)
    assert cli.main(["compare", "--resume", "../c"]) == 0
    assert [start["directory"] for start in starts(stand_in)] == [str(tmp_path)] * 2
    content = path.read_text().replace('"status": 0', '"status": null')
    path.write_text(content.replace(json.dumps(str(tmp_path)), '"/gone"'))
    assert cli.main(["compare", "--resume", "../c"]) == 2  # the config here is another one
    (elsewhere / "own.toml").write_text('extends = "llama3_debug"\n')
    assert cli.main(["compare", "--resume", "../c"]) == 0


def test_a_comparison_that_cannot_be_written_for_a_while_goes_on(stand_in, monkeypatch, capfd):
    written, calls = side_by_side.write_comparison, []

    def fails_once(folder, runs):
        calls.append([run.status for run in runs.values()])
        if len(calls) == 1:
            raise ConfigError("comparison.json cannot be written: No space left on device")
        written(folder, runs)

    monkeypatch.setattr(side_by_side, "write_comparison", fails_once)
    assert compare("llama3_debug", "--seeds=2", kind="killed") == 1
    assert calls == [[0, None], [0, 1], [0, 1]], "written again at the end"
    assert [run["status"] for run in json.loads((stand_in / "comparison.json").read_text())] == [0, 1]
    out = capfd.readouterr().out
    assert out.count("warning: comparison.json cannot be written: No space left on device") == 1
    assert "and the rest goes on: mxtrain: training failed: the worker ended with SIGKILL\n" in out


def _compare_in_a_terminal(folder, train):
    """In a process of its own: two runs at a time, which wait to be stopped."""
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    os.environ["PYTHONPATH"] = str(Path(cli.__file__).parents[2])
    side_by_side.TRAIN, report.curves_svg = train, lambda group: ""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs ignore it
    sys.exit(compare("llama3_debug", "--seeds=3", "--side-by-side=2", kind="wait"))


@pytest.mark.parametrize("killed", [False, True])
def test_ctrl_c_stops_all_runs_and_says_how_to_go_on(stand_in, killed, tmp_path):
    process = forking_context().Process(target=_compare_in_a_terminal, args=(tmp_path, side_by_side.TRAIN))
    process.start()
    end = time.monotonic() + 60
    while len(list(stand_in.glob("*/metrics.jsonl"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL if killed else signal.SIGINT)
    process.join(30)
    output = (tmp_path / "output").read_text()
    runs = [json.loads((stand_in / "comparison.json").read_text())[seed] for seed in range(3)]
    if killed:
        assert [run["status"] for run in runs] == [None] * 3
        workers = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_of(path, stand_in)]
        time.sleep(0.5)
        assert not [path for path in workers if _is_of(path, stand_in)], "runs end with the command"
        return
    assert process.exitcode == 130
    assert [run["status"] for run in runs] == [130, 130, None]
    assert "SIGINT: stopping 2 runs" in output and "llama3_debug-seed1: stopped after" in output
    assert "go on with: mxtrain compare --resume c" in output
    assert (stand_in / "llama3_debug-seed0.log").read_text() == "stopped\n", "each run got the signal once"


def _is_of(cmdline: Path, folder: Path) -> bool:
    try:
        return str(folder.parent / "stand_in.py").encode() in cmdline.read_bytes() and b"wait" in cmdline.read_bytes()
    except OSError:
        return False


def test_a_run_that_cannot_start_keeps_its_folder(stand_in, capfd):
    assert compare("llama3_debug", kind="crash") == 0
    path = stand_in / "comparison.json"
    path.write_text(path.read_text().replace('"status": 0', '"status": null'))
    (stand_in / "llama3_debug-seed0" / "metrics.jsonl").unlink()
    (stand_in / "llama3_debug-seed0" / "checkpoint").write_text("not a folder")
    assert cli.main(["compare", "--resume", "c"]) == 1
    out, _ = capfd.readouterr()
    assert "FAILED: checkpoint.folder: " in out and "is not a folder" in out and not (stand_in / "set_aside").exists()
    assert '"status": 2' in path.read_text()


def test_a_run_whose_folder_is_in_use_is_reported(stand_in, capfd):
    """The runs of a comparison that was killed may still be saving when it is started again."""
    with locked(stand_in / "llama3_debug-seed0"):
        assert compare("llama3_debug", "p1=llama3_debug --mxnorm.p 1") == 1
    failed = "llama3_debug-seed0: FAILED: job.dump_folder = 'c/llama3_debug-seed0' is in use by process"
    assert f"{failed} {os.getpid()}" in capfd.readouterr().out
    assert cli.main(["compare", "--resume", "c"]) == 0
    assert [start["run"] for start in starts(stand_in)] == ["p1-seed0", "llama3_debug-seed0"]


def test_a_dry_run_shows_the_commands_and_leaves_nothing(stand_in, capsys):
    assert compare("llama3_debug", "--lr", "3.0000001e-4,0.001", "--steps", "7", "--dry-run") == 0
    out = capsys.readouterr().out.splitlines()
    flags = "--job.description=train --training.steps=7 --optimizer.lr=0.00030000001 --debug.seed=0"
    assert out[:2] == [
        "2 runs in c, 1 at a time",
        f"llama3_debug-lr0.00030000001-seed0: mxtrain train llama3_debug {flags}",
    ]
    assert compare("llama3_125m", "--dry-run") == 0, "a plan for a machine with GPUs, which torch.compile needs"
    assert not stand_in.exists()


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--seeds", "2"], "VARIANT is missing: give configs, or --resume"),
        (["llama3_debug", "--lr", "1e-3,fast"], "--lr 1e-3,fast: 'fast' is not a positive number"),
        (["llama3_debug", "--lr", "0"], "--lr 0: '0' is not a positive number"),
        (["llama3_debug", "--baseline", "p1"], "--baseline 'p1' is not one of the variants: llama3_debug"),
        (
            ["llama3_debug", "--training.step=3"],
            "llama3_debug-seed0: training.step is not a setting; the closest is training.steps",
        ),
        (["--resume", "gone"], "--resume gone: no comparison has been here, comparison.json is missing"),
        (["llama3_debug", "--resume", "gone"], "--resume takes the variants, seeds and flags of the comparison"),
        (["--resume", "gone", "--seeds", "3"], "--resume takes the variants, seeds and flags of the comparison"),
        (["--resume", "gone", "-o", "g"], "--resume takes the variants, seeds and flags of the comparison"),
        (["llama3_debug", "--seed", "2"], "llama3_debug-seed0: seed is not a setting"),
        (
            ["llama3_debug", "b=llama3_debug --parallelism.tensor_parallel_degree=3", "--gpus=2"],
            "b-seed0: parallelism.tensor_parallel_degree = 3 does not fit 2 process(es), which",
        ),
        (["llama3_debug --training.dataset=files --training.dataset_path=gone"], "llama3_debug-training.dataset-files"),
        (["llama3_debug", "-o", "/proc/nope"], "--output = '/proc/nope' cannot be written: "),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(stand_in, capsys, words, problem):
    assert cli.main(["compare", *words]) == 2
    assert capsys.readouterr().err.startswith(f"mxtrain: error: {problem}")
    assert [path.name for path in stand_in.parent.iterdir()] == ["stand_in.py"]


@pytest.mark.parametrize(
    "visible, gpus, asked, expected",
    [
        (None, 1, None, ["0", "1", "2", "3"]), ("4,5,6,7", 2, None, ["4,5", "6,7"]), (None, 1, 2, ["0", "1"]),
        (None, 3, None, ["0,1,2"]), (None, 5, None, "--gpus 5: PyTorch sees 4 GPUs, which are too few"),
        (None, 2, 3, "--side-by-side 3 of --gpus 2: PyTorch sees 4 GPUs"),
    ],
)  # fmt: skip
def test_every_run_gets_gpus_of_its_own(monkeypatch, visible, gpus, asked, expected):
    monkeypatch.setattr(launch, "accelerator_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if isinstance(expected, str):
        with pytest.raises(compare_command.ConfigError, match=expected):
            compare_command._devices(gpus, asked)
    else:
        assert compare_command._devices(gpus, asked) == expected


@pytest.mark.sweep
def test_two_variants_from_start_to_report(tmp_path):
    """The first-step losses of two variants that differ in the kernels of a high-precision norm are equal."""
    sizes = ["--training.seq_len=32", "--training.local_batch_size=2", "--data.max_bytes=100000"]
    quiet = ["--validation.no-enable", "--metrics.no-enable_wandb", "--metrics.log_freq=1"]
    words = ["compare", "llama3_debug_bf16", "fused=llama3_debug_fused_rmsnorm", "--steps=1", *sizes, *quiet, "-o", "c"]
    compared = Forked(cli.main, words, cwd=tmp_path)
    _, err = compared.communicate(300)
    assert compared.process.exitcode == 0, err
    losses = [load_run(tmp_path / "c" / f"{name}-seed0").first_loss for name in ("llama3_debug_bf16", "fused")]
    assert losses[1] == pytest.approx(losses[0], rel=3e-7)  # two units in the last place of an fp32 sum
    assert "fused" in (tmp_path / "c" / "report.md").read_text()
