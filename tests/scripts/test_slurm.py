"""The Slurm script on one machine: two launchers as two nodes, with stand-ins for Slurm's own programs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w

from mxtrain.analysis import load_run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "train_configs" / "train.sbatch"
# Starts the command twice, as on two nodes, and ends both when one fails. It passes on signals to nobody: Slurm signals
# the processes of a step.
SRUN = """#!/usr/bin/env bash
shift  # --kill-on-bad-exit
for node in 0 1; do "$@" & done
for node in 0 1; do wait -n || { status=$?; kill $(jobs -p); wait; exit $status; }; done
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; echo localhost; else echo "$@" >> "$SCONTROL_LOG"; fi
"""


def test_bash_parses_the_script_and_what_runs_on_a_node():
    (node,) = re.findall(r"^node='(.*?)'$", SCRIPT.read_text(), flags=re.MULTILINE | re.DOTALL)
    for script in (SCRIPT.read_text(), node):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_flags_count_until_the_job_has_saved(tmp_path):
    """A job that was killed after its first step and before its first checkpoint begins as it was told to begin."""
    for name, content in (("srun", 'echo "$@" > "$STARTED"'), ("scontrol", "echo localhost")):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{content}\n")
        (tmp_path / name).chmod(0o755)
    run, started = tmp_path / "a run", tmp_path / "started"
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MXTRAIN_RUN": str(run), "STARTED": str(started)}
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "localhost"}

    def resumes() -> bool:
        subprocess.run(["bash", SCRIPT, "a.toml", "--checkpoint.load_step=3"], env=os.environ | own | slurm, check=True)
        return started.read_text().endswith(f"node --resume {run}\n")

    (run / "checkpoint" / "step-3").mkdir(parents=True)
    assert not resumes()
    (run / "config.toml").touch()
    (run / "checkpoint" / ".saving" / "step-6").mkdir(parents=True)
    assert not resumes()
    (run / "checkpoint" / "step-6").mkdir()
    assert resumes()


def slurm_job(folder: Path, *flags: str, restart: int) -> subprocess.Popen:
    """Start the batch script as Slurm does: a copy of it, in the folder where it was submitted."""
    environment = {
        **os.environ,
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "TRITON_INTERPRET": "0",
        "MXTRAIN_CACHE": str(folder / "cache"),
        "MXTRAIN_RUN": str(folder / "run"),
        "NGPU": "1",
        "SCONTROL_LOG": str(folder / "scontrol.log"),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "2",
        "SLURM_RESTART_COUNT": str(restart),
    }
    output = open(folder / f"output-{restart}.txt", "w")
    command = ["bash", str(folder / "slurm_script"), str(folder / "job.toml"), *flags]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def processes_of_steps(job: subprocess.Popen) -> list[int]:
    """Return the launchers and workers of a job. Workers have sessions of their own."""
    listing = subprocess.run(["ps", "-ww", "-eo", "ppid=,pid=,args="], capture_output=True, text=True).stdout
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    inside = {str(job.pid)}
    while more := {pid for parent, pid, _ in rows if parent in inside} - inside:
        inside |= more
    return [int(p) for _, p, command in rows if p in inside and re.match(r"\S*python.* -m mxtrain\.train ", command)]


def ended(job: subprocess.Popen, output: Path) -> tuple[int | None, str]:
    """Wait for a job. Return its status, or None and all stacks if it takes too long, and the end of its output."""
    with suppress(subprocess.TimeoutExpired):
        job.wait(200)
    for process in processes_of_steps(job):
        os.kill(process, signal.SIGABRT)
    time.sleep(0 if job.returncode == 0 else 2)
    return job.returncode, output.read_text()[-20000:]


@pytest.mark.sweep
def test_a_job_on_two_nodes_saves_goes_back_into_the_queue_and_resumes(tmp_path):
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    shutil.copy(SCRIPT, tmp_path / "slurm_script")
    config = {
        "job": {"custom_config_module": "mxtrain.titan.job_config"},
        "experimental": {"custom_import": "mxtrain.titan"},
        "model": {"name": "llama3", "flavor": "debugmodel", "converters": ["mxnorm"]},
        "model_args": {"n_layers": 1},
        "data": {"vocab_size": 300},
        "training": {
            "dataset": "files",
            "dataset_path": str(ROOT / "mxtrain" / "titan" / "*.py"),
            "local_batch_size": 1,
            "global_batch_size": 2,
            "seq_len": 32,
            "steps": 100000,
        },
        "metrics": {"log_freq": 1},
    }
    (tmp_path / "job.toml").write_text(tomli_w.dumps(config))

    # A flag that says how the run begins must not take effect again.
    flags = ["--checkpoint.exclude_from_loading", "dataloader"]
    job = slurm_job(tmp_path, *flags, restart=0)
    metrics, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 200
    while job.poll() is None and time.monotonic() < end:
        if metrics.exists() and metrics.read_text().count("\n") >= 3:
            break
        time.sleep(0.1)
    for process in (steps := processes_of_steps(job)):
        os.kill(process, signal.SIGUSR1)
    status, output = ended(job, tmp_path / "output-0.txt")
    assert len(steps) == 4 and status == 0 and "stopped by SIGUSR1 after step" in output, output
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {os.getpid()}\n"
    (checkpoint,) = (tmp_path / "run" / "checkpoint").glob("step-*")
    saved = int(checkpoint.name.removeprefix("step-"))

    resolved = tmp_path / "run" / "config.toml"
    text = resolved.read_text()
    assert "exclude_from_loading" in text
    resolved.write_text(text.replace("steps = 100000", f"steps = {saved + 2}"))
    job = slurm_job(tmp_path, *flags, restart=1)
    status, output = ended(job, tmp_path / "output-1.txt")
    assert status == 0, output
    assert [row["step"] for row in load_run(tmp_path / "run").training] == list(range(1, saved + 3))
    assert "exclude_from_loading" not in resolved.read_text()
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {os.getpid()}\n", "a run that has ended stays so"
