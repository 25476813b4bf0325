"""``mxtrain train`` with stand-ins for the worker module, in real processes."""

import json
import os
import re
import runpy
import signal
import time
from datetime import datetime
from unittest import mock

import pytest
import torch

from mxtrain.cli import doctor, launch
from mxtrain.errors import ConfigError
from mxtrain.launched import ALLOCATOR_VARIABLES, COMPILE_VARIABLE
from tests.support.forked import Forked

FAKE_WORKER = """
import json, os, pathlib, signal, sys, time

arguments = sys.argv[1:]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = pathlib.Path(arguments[arguments.index("--job.dump_folder") + 1])
kind, _, culprit = arguments[arguments.index("--job.description") + 1].partition("@")
mine = rank == int(culprit or 0)
if kind == "trains":  # and saves for long
    signal.signal(signal.SIGTERM, lambda *a: None)
print(f"worker {rank} speaks", flush=True)
if kind == "late_mistake":
    (folder / "metrics.jsonl").write_text("{}")
    sys.exit(2)
elif kind == "work":
    facts = {"arguments": arguments, "world_size": world_size, "threads": os.environ.get("OMP_NUM_THREADS")}
    facts["start"] = json.loads(os.environ["MXTRAIN_START"])
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))
    if rank == 0:
        rows = [{"step": s, "loss": 9.0 - s, "tokens_per_second": 10.0, "memory_gib": 1.0} for s in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
elif kind == "mistake" and mine:
    from mxtrain.errors import ConfigError
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(ConfigError("training.dataset = 'x' is wrong"))
    print("mxtrain: error: training.dataset = 'x' is wrong", file=sys.stderr)
    sys.exit(2)
elif kind == "crash" and mine:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def work():
        raise RuntimeError("the worker broke")

    work()
elif kind == "kill" and mine:
    os.kill(os.getpid(), signal.SIGKILL)
else:
    (folder / f"ready{rank}").touch()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.1)
"""


COMPILE = "--compile.enable"


@pytest.fixture
def launched(tmp_path, monkeypatch, capfd):
    """Run ``launch.train`` on the fake worker in an empty folder; returns (status, stdout, stderr)."""
    (tmp_path / "fake_worker.py").write_text(FAKE_WORKER)
    (tmp_path / "tiny.toml").write_text("[training]\nsteps = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.setattr(launch, "WORKER", "fake_worker")
    monkeypatch.setattr(os, "environ", os.environ.copy())  # which the launcher changes
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the launcher warns about GPUs that PyTorch does not see
    for name in ("NGPU", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def launched(*flags, processes=None):
        if processes:
            monkeypatch.setenv("NGPU", str(processes))
        status = launch.train("tiny.toml", list(flags))
        return status, *capfd.readouterr()

    return launched


def test_a_run_gets_a_folder_and_its_flags(launched, tmp_path):
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status, out, err = launched("--job.description", "work", "--training.steps=3")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert status == 0
    (folder,) = (tmp_path / "outputs").iterdir()
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", folder.name)
    facts = json.loads((folder / "rank0.json").read_text())
    assert facts["world_size"] == 1 and facts["threads"] is None and facts["start"]["step"] == 0
    relative = str(folder.relative_to(tmp_path))
    own = ["--job.description", "work", "--training.steps=3", "--job.dump_folder", relative]
    assert facts["arguments"] == ["--job.config_file=tiny.toml", *own]
    assert out == f"mxtrain: run folder {relative}\nworker 0 speaks\n"  # the worker prints its own summary
    assert err == ""
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "metrics.jsonl", "rank0.json"]


@pytest.mark.parametrize(("devices", "flags", "compiles"), [(1, [], None), (1, [COMPILE], "1"), (0, [COMPILE], None)])
def test_workers_know_early_that_they_compile_for_a_gpu(launched, monkeypatch, devices, flags, compiles):
    seen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(launch, "run_workers", lambda *args: seen.append(args[-1]) or 0)
    launched("--model.converters=", *flags)
    assert [environment.get(COMPILE_VARIABLE) for environment in seen] == [compiles]


def test_files_in_the_current_folder_do_not_stand_in_for_packages(tmp_path, monkeypatch):
    for folder, name, text in [("a", "fake_worker.py", "import wave; wave.Wave_read"), ("b", "wave.py", "")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    monkeypatch.setattr(launch, "WORKER", "fake_worker")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path / "a"), os.environ.get("PYTHONPATH")])))
    monkeypatch.chdir(tmp_path / "b")
    assert launch.run_workers([], 1, tmp_path / "b", {}) == 0


def test_ngpu_starts_that_many_processes_and_only_the_first_writes_to_the_terminal(launched, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "package_version", lambda name: "9; not tested" if name == "torch" else "1")
    (tmp_path / "tiny.toml").write_text('[job]\ndump_folder = "mine"\n')
    status, out, err = launched("--job.description", "work", processes=2)
    assert err == "mxtrain: warning: torch 9; not tested\n"  # by the launcher, not by every worker
    assert status == 0 and not (tmp_path / "outputs").exists()
    facts = [json.loads((tmp_path / "mine" / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [f["world_size"] for f in facts] == [2, 2]
    own = ["--job.description", "work", "--job.dump_folder", "mine"]
    assert facts[0]["arguments"] == ["--job.config_file=tiny.toml", *own]
    assert int(facts[0]["threads"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert "worker 0 speaks" in out and "worker 1 speaks" not in out
    (log,) = (tmp_path / "mine" / "worker_logs").glob("*/attempt_0/1/stdout.log")
    assert log.read_text() == "worker 1 speaks\n"


def test_after_a_mistake_in_the_settings_there_is_one_line_and_no_folder(launched, tmp_path):
    status, _, err = launched("--job.description", "mistake@1", processes=2)
    assert status == 2
    assert err == "mxtrain: error: training.dataset = 'x' is wrong\n"
    assert not list((tmp_path / "outputs").iterdir())


def test_a_mistake_does_not_remove_a_folder_that_was_there_or_that_holds_results(launched, tmp_path):
    (tmp_path / "mine").mkdir()
    status, _, err = launched("--job.description", "mistake", "--job.dump_folder", "mine")  # said once, by its worker
    assert (status, err) == (2, "mxtrain: error: training.dataset = 'x' is wrong\n")
    assert (tmp_path / "mine").is_dir()
    assert launched("--job.description", "late_mistake", "--job.dump_folder", "new")[0] == 2
    assert (tmp_path / "new" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "kind, processes, end",
    [
        ("crash@0", 1, "the worker ended with exit status 1"),
        ("crash@1", 2, "worker 1 of 2 ended with exit status 1: RuntimeError: the worker broke; see (.*)"),
        ("kill@1", 2, "worker 1 of 2 ended with SIGKILL, often for lack of memory"),
    ],
)
def test_a_crash_keeps_its_folder_and_ends_with_one_line(launched, kind, processes, end, tmp_path):
    start = time.monotonic()
    status, _, err = launched("--job.description", kind, processes=processes)
    assert status == 1
    assert time.monotonic() - start < 55  # the other worker would sleep for a minute
    *others, last = err.splitlines()
    line = re.fullmatch(f"mxtrain: training failed: {end}", last)
    assert line
    if kind == "crash@0":
        assert others[-1] == "RuntimeError: the worker broke"  # the end of its traceback
    else:
        assert not others
    if line.groups():
        assert "in work\n    raise RuntimeError" in (tmp_path / line[1]).read_text()
    assert len(list((tmp_path / "outputs").iterdir())) == 1


def launch_fake_worker() -> int:
    launch.WORKER = "fake_worker"
    return launch.train("tiny.toml", ["--job.dump_folder", "run", "--job.description", os.environ["KIND"]])


@pytest.mark.parametrize("kind, processes", [("starts", 2), ("trains", 1)])
def test_a_signal_goes_to_the_workers_and_a_persons_second_one_kills_them(kind, processes, tmp_path):
    (tmp_path / "fake_worker.py").write_text(FAKE_WORKER)
    (tmp_path / "tiny.toml").write_text("")
    forked = Forked(launch_fake_worker, cwd=tmp_path, NGPU=str(processes), KIND=kind)
    end = time.monotonic() + 120
    while len(list(tmp_path.glob("run/ready*"))) < processes:
        assert time.monotonic() < end
        time.sleep(0.02)
    if kind == "trains":
        for _ in range(2):  # one signal, sent twice by a terminal or Slurm
            os.kill(forked.process.pid, signal.SIGTERM)
            time.sleep(0.1)
        time.sleep(1)
        assert forked.process.is_alive()
    os.kill(forked.process.pid, signal.SIGTERM)
    _, err = forked.communicate()
    assert forked.process.exitcode == 128 + signal.SIGTERM
    assert err == "mxtrain: SIGTERM: stopping; a second SIGTERM kills the workers\n"


def test_one_process_per_accelerator_by_default_and_as_many_as_ngpu_says():
    for ngpu, devices, expected in (("", 0, 1), ("", 8, 8), ("3", 0, 3), ("3", 8, 3), ("8", 8, 8)):
        assert launch.process_count({"NGPU": ngpu}, devices) == expected
    assert launch.process_count({}, 8) == 8
    for value in ("0", "-1", "two", "1.5", " "):
        with pytest.raises(ConfigError, match=f"NGPU = '{value}' .*; allowed is 1, 2, ..."):
            launch.process_count({"NGPU": value}, 0)
    with pytest.raises(ConfigError, match="NGPU = 9 .* allowed is 1 to 8"):
        launch.process_count({"NGPU": "9"}, 8)


def test_defaults_of_workers(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    spins = {"GOMP_SPINCOUNT": "1000", "MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
    users = dict.fromkeys(("OMP_NUM_THREADS", *spins), "9")
    assert launch.worker_defaults({}, 1, 1) == {} and launch.worker_defaults({}, 1, 0) == spins
    assert launch.worker_defaults({}, 4, 0) == spins | {"OMP_NUM_THREADS": "3"}
    assert launch.worker_defaults({}, 100, 1) == {"OMP_NUM_THREADS": "1"}
    assert launch.worker_defaults(users, 2, 0) == {}


@pytest.mark.parametrize("given", [None, *ALLOCATOR_VARIABLES])
def test_workers_let_memory_segments_grow_unless_the_user_has_set_the_allocator(monkeypatch, given):
    """Before training, and so before anything is on a GPU. torchrun's first worker names untested versions first."""
    import mxtrain.titan.train  # noqa: F401  (PyTorch sets variables of its own when it is imported)

    found, environment = [], {"RANK": "0"} | ({given: "max_split_size_mb:512"} if given else {})
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr("mxtrain.titan.train.work", lambda *_: found.append(dict(environment)))
    monkeypatch.setattr("mxtrain.cli.doctor.warn_of_untested_packages", lambda: found.append("versions"))
    monkeypatch.setattr("mxtrain.launched.end_with_launcher", lambda: None)
    monkeypatch.setattr("mxtrain.cli.console.hide_library_warnings", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        runpy.run_module("mxtrain.train", run_name="__main__")
    grow = {} if given else {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}
    assert found == ["versions", environment | grow]


def test_runs_started_in_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    monkeypatch.setattr(launch, "datetime", mock.Mock(now=lambda: datetime(2020, 1, 2, 12)))
    folders = [launch.make_run_folder("configs/a.toml", None) for _ in range(3)]
    assert [f.as_posix() for f, _ in folders] == [f"outputs/a-20200102-120000{suffix}" for suffix in ("", "-2", "-3")]


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="job.dump_folder = '.*file' cannot be created: File exists$"):
        launch.make_run_folder("a.toml", str(tmp_path / "file"))
    assert launch.make_run_folder("a.toml", str(tmp_path)) == (tmp_path, False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="job.dump_folder = 'outputs' cannot be created: File exists$"):
        launch.make_run_folder("a.toml", None)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a stand-in for nvidia-smi, which prints the given text, first on PATH."""

    def nvidia_smi(text):
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && cat <<'END'\n{text}END\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return nvidia_smi


LISTING = """GPU 0: NVIDIA H200 (UUID: GPU-1)
  MIG 1g.18gb     Device  0: (UUID: MIG-1)
GPU 1: NVIDIA H200 (UUID: GPU-2)
"""


def test_gpus_are_read_from_nvidia_smi(nvidia_smi, monkeypatch, tmp_path):
    nvidia_smi(LISTING)
    assert doctor.nvidia_gpus() == ["NVIDIA H200", "NVIDIA H200"]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert doctor.nvidia_gpus() == []
    nvidia_smi("No devices found.\n")
    assert doctor.nvidia_gpus() == []
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert doctor.nvidia_gpus() == []


def test_a_gpu_that_pytorch_cannot_use_is_reported(nvidia_smi, monkeypatch, capsys):
    nvidia_smi(LISTING)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert launch.accelerator_count() == 0
    assert "2 NVIDIA GPU(s), but PyTorch" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launch.accelerator_count() == 2
    assert capsys.readouterr().err == ""
