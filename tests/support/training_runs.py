"""Runs of the real trainer for tests: tiny models, tiny text, on a CPU.

Most of a short run is imports, so one process trains one model after another. The runs of a test session are done
once, by the pytest worker that needs them first.
"""

import json
import os
import shutil
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from filelock import FileLock

from mxtrain import cli
from mxtrain.analysis import load_run
from mxtrain.titan.releases import RELEASE
from tests.support.forked import ENVIRONMENT, Forked, forking_context
from tests.support.training_worker import REPOSITORY, Configured, Resumed, Runs, train_all

TEXT = ("asyncio", "email", "http", "xml")
"""Packages of the standard library, 1.4 MB: the text that the runs read"""

CONFIG = {
    "job": {"custom_config_module": "mxtrain.titan.job_config"},
    "experimental": {"custom_import": "mxtrain.titan"},
    "model": {"name": "llama3", "flavor": "tiny", "converters": ["mxnorm"]},
    "data": {"vocab_size": 512},
    "optimizer": {"lr": 1e-2},
    "lr_scheduler": {"warmup_steps": 3, "total_steps": 12},
    "training": {
        "dataset": "files",
        "local_batch_size": 4,
        "seq_len": 64,
        "steps": 12,
        "mixed_precision_param": "float32",
    },
    "metrics": {"log_freq": 1},
    "activation_checkpoint": {"mode": "none"},
    "debug": {"seed": 0},
}

BF16 = "--model.converters="
FUSED = "--model.converters=fused_norm"
NVFP4 = "--mxnorm.recipe=nvfp4"
GATES = ["--model.name=deepseek_v3", "--model.converters=decompose_k_router"]
MIXED_RECIPE = "fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4"
MIXED_RECIPES = {"layers.*.feed_forward.w2": "mxfp8", "layers.0": "bf16"}
SAVE = ["--checkpoint.enable", "--checkpoint.interval=1000"]
SAVE_HALF_WAY = ["--checkpoint.enable", "--checkpoint.interval=6"]
SEED = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
SAVE_EACH = ["--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2"]
# The weights explode in the first step. No later step is logged.
EXPLODE = ["--optimizer.lr=1e38", "--metrics.log_freq=100"]
VALIDATION_SIZES = [
    "--validation.seq_len=64", "--validation.local_batch_size=4", "--validation.freq=10", "--validation.steps=1",
]  # fmt: skip
TIED = ["--model_args.enable_weight_tying", "--model_args.hidden_dim=160", SAVE[0]]
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
NUMERICS = ["--mxnorm.diagnostics.every=2", "--mxnorm.diagnostics.tokens=64"]
SCHEDULE_ENTRIES = [
    "--mxnorm.schedule",
    '{from_step = 3, until_step = 5, modules = ["layers.1"], recipe = "fprop=bf16"}',
]
SAVE_SECOND = ["--checkpoint.enable", "--checkpoint.interval=2"]
ACCUMULATE = ["--training.local_batch_size=2", "--training.global_batch_size=4"]


def steps(count: int) -> str:
    return f"--training.steps={count}"


def load(run: Path, step: int, count: int = 2) -> list[str]:
    """Flags to start from another run's checkpoint."""
    return [*SAVE, f"--checkpoint.initial_load_path={run / 'checkpoint' / f'step-{step}'}", steps(count)]


def validate(base: Path) -> list[str]:
    path = f"--validation.dataset_path={base / 'text'}/**/*.py"
    return ["--validation.enable", "--validation.dataset=files", path, *VALIDATION_SIZES]


def seeds(base: Path) -> dict[str, "Outcome"]:
    """Save the weights from which runs of one process and of several start.

    Others can start before all of ``one_process`` is done.
    """
    return done_once(base, "seeds", 1, {"dense": SEED, "experts": ["--model.name=deepseek_v3", BF16, *SEED]})


def one_process(base: Path) -> dict[str, "Outcome"]:
    """Train with one process: every converter, and checkpoints across converters."""
    _killed(base)
    one = base / "one"
    dense, moe = (seeds(base)[name].folder for name in ("dense", "experts"))
    mixed = ["--mxnorm.recipes", *(word for pair in MIXED_RECIPES.items() for word in pair)]
    experts = validate(base)
    return done_once(
        base,
        "one",
        1,
        {
            # Every variant learns.
            "mxnorm": SAVE_HALF_WAY,
            "mxnorm again": [steps(3), *validate(base), "--validation.freq=2", "--verbose"],
            "p1": ["--mxnorm.p=1", steps(3), "--checkpoint.interval=3"],
            "validation follows": [steps(1), "--validation.enable", *VALIDATION_SIZES],
            "exact": ["--mxnorm.estimator=exact", steps(3)],
            "post_round": ["--mxnorm.estimator=post_round", steps(3)],
            "mx_linear": ["--model.converters=mx_linear", steps(3)],
            "mxfp4": ["--mxnorm.recipe=mxfp4", steps(3)],
            "e5m2": ["--mxnorm.recipe=fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2", steps(3)],
            "mixed": [f"--mxnorm.recipe={MIXED_RECIPE}", *mixed, *SAVE_HALF_WAY],
            "bf16": [BF16],
            "fused": [FUSED, steps(1)],
            "nvfp4": [NVFP4, *SAVE_HALF_WAY],
            "deepseek_v3": [*GATES, *experts],
            **_only_in_022(
                {"llama4": ["--model.name=llama4", "--model.converters=mxnorm,decompose_k_router", steps(3)]}
            ),
            "qwen3": ["--model.name=qwen3", "--model.converters=mxnorm,decompose_k_router", *experts, *SAVE_HALF_WAY],
            # Checkpoints load across converters.
            "mxnorm, then mxnorm": load(one / "mxnorm", 12),
            "mxnorm, then bf16": [*load(one / "mxnorm", 12), BF16],
            "bf16, then mxnorm": load(one / "mxnorm, then bf16", 2, 1),
            # Runs that resume: exactly as they were, and with other settings.
            **{f"{name}, resumed": Resumed(name, 6) for name in ("mxnorm", "nvfp4", "mixed")},
            "qwen3, resumed": Resumed("qwen3", 6, NUMERICS),
            # Validated after the steps that are saved, on a text that goes to other experts.
            "validated": [
                *GATES,
                *validate(base),
                f"--validation.dataset_path={REPOSITORY / 'LICENSE'}",
                "--validation.freq=1",
                "--validation.steps=-1",
                "--checkpoint.enable",
                "--checkpoint.interval=1",
                steps(4),
            ],
            "validated, resumed": Resumed("validated", 1),
            "scheduled": [*SCHEDULE_ENTRIES, *SAVE_SECOND, steps(7)],
            "scheduled, resumed": Resumed("scheduled", 4),
            "scheduled, another entry": Resumed(
                "scheduled", 4, ["--mxnorm.schedule", '{from_step = 4, norm = "rmsnorm"}']
            ),
            "unscheduled": [*SAVE_SECOND, steps(3)],
            "tied": [*TIED, steps(2)],
            "microbatches": [NVFP4, *ACCUMULATE, *SAVE_EACH, steps(2)],
            "muon": ["--model.name=qwen3", "--optimizer.name=Muon", *SAVE_EACH, steps(2)],
            "muon, resumed": Resumed("muon", 1),
            "microbatches, resumed": Resumed("microbatches", 1, [*NUMERICS, "--mxnorm.cache_weights=false"]),
            "changed": Resumed("mxnorm", 6, ["--optimizer.lr=2e-3", steps(8)]),
            "another p, allowed": Resumed("mxnorm", 6, ["--mxnorm.p=1", "--checkpoint.may_change=mxnorm.p", steps(7)]),
            "longer": Resumed("mxnorm", 12, [steps(14), "--lr_scheduler.total_steps=14"]),
            "done": Resumed("mxnorm", 12, [steps(8), "--lr_scheduler.warmup_steps=8"]),
            "replaced": [steps(1), f"--job.dump_folder={one / 'mxnorm'}"],
            "killed, resumed": [*SAVE_EACH, f"--job.dump_folder={base / 'killed' / 'run'}"],
            # Losses that are not finite.
            "nan": [*EXPLODE, *SAVE_EACH],
            "nan, continued": [*EXPLODE, *SAVE_EACH, steps(4), "--metrics.on_nonfinite_loss=continue"],
            # The same as several processes do.
            "from seed": load(dense, 0),
            "from seed, fused": [*load(dense, 0), FUSED],
            "from seed of experts": [*load(moe, 0), *GATES],
            "from seed of experts, PyTorch's gates": [
                *load(moe, 0),
                "--model.name=deepseek_v3",
                BF16,
                "--activation_checkpoint.mode=selective",
            ],
        },
    )


def _only_in_022(runs: Runs) -> Runs:
    """Runs with a model or a setting that TorchTitan 0.3 does not have."""
    return runs if RELEASE == "v02" else {}


def _killed(base: Path) -> None:
    """Train with a checkpoint every step, and kill the process in the middle of it."""
    metrics = base / "killed" / "run" / "metrics.jsonl"

    def kill(workers: list) -> None:
        wait_for_lines(metrics, 4)
        for worker in workers:
            assert worker.is_alive()
            worker.kill()

    with FileLock(base / "killed.lock"):
        if not (base / "killed").exists():
            copy_text(base)
            launch(base / "killed", {"run": SAVE_EACH}, 1, disturb=kill)
            for step in (100, 200):  # parts that earlier kills left
                (base / "killed" / "run" / "checkpoint" / f"step-{step}").mkdir()


def several_processes(base: Path) -> dict[str, "Outcome"]:
    """Train with two and with four processes, from the weights that one process saved.

    Only "resharded" starts from its own weights: two processes, then one and four in the same folder.
    """
    dense, moe = (seeds(base)[name].folder for name in ("dense", "experts"))
    halves, experts = "--training.local_batch_size=2", [*load(moe, 0), *GATES]
    resharded = [BF16, *SAVE]
    resumed = [*resharded, f"--job.dump_folder={base / 'two' / 'resharded'}"]
    saved = [halves, "--checkpoint.interval=1"]
    mixed = [f"--mxnorm.recipe={MIXED_RECIPE}", "--mxnorm.high_precision_share=0"]
    two = {
        "resharded": [*resharded, halves, steps(2)],
        "fsdp": [*load(dense, 0), *saved],
        "tp": [*load(dense, 0), FUSED, "--parallelism.tensor_parallel_degree=2"],
        "experts, fsdp": [*experts, *saved],
        "experts, ep": [*experts, halves, "--parallelism.expert_parallel_degree=2"],
        "tied, fsdp": [*TIED, halves, steps(2)],
        "nvfp4, fsdp": [*load(dense, 0), NVFP4, *saved],
        "mixed, fsdp": [*load(dense, 0), *mixed, *saved],
        **{f"{name}fsdp, resumed": Resumed(f"{name}fsdp", 1) for name in ("", "mixed, ", "experts, ")},
        "nvfp4, fsdp, resumed": Resumed("nvfp4, fsdp", 1, NUMERICS),
        "nan": [*EXPLODE, halves],
        "pipeline": ["--parallelism.pipeline_parallel_degree=2", f"{SCHEDULE}=ZBVZeroBubble"],
    }
    degrees = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"]
    four = {"hsdp": [*load(dense, 0, 1), *degrees, "--training.local_batch_size=1"]}
    four["resharded on four"] = [*resumed, "--training.local_batch_size=1", steps(6)]
    return (
        done_once(base, "two", 2, two)
        | done_once(base, "one after two", 1, {"resharded on one": [*resumed, steps(4)]})
        | done_once(base, "four", 4, four)
    )


def command_run(base: Path) -> "Outcome":
    """Run ``mxtrain train`` as a user does, on the debug model. The output is [stdout, stderr]."""
    folder, text = base / "command", base / "one-file.py"
    with FileLock(base / "command.lock"):
        if not folder.exists():
            text.write_text((REPOSITORY / "mxtrain" / "titan" / "data.py").read_text() * 4)
            small = {"local_batch_size": 2, "seq_len": 32, "steps": 4, "dataset_path": str(text)}
            validation = {
                "enable": True,
                "dataset": "files",
                "local_batch_size": 1,
                "seq_len": 32,
                "freq": 3,
                "steps": 1,
            }
            config = {
                **CONFIG,
                "model": {**CONFIG["model"], "flavor": "debugmodel"},
                "model_args": {"n_layers": 1},
                "data": {"vocab_size": 300, "validation_share": 0.0, "cache_dir": str(base / "command-cache")},
                "training": {**CONFIG["training"], **small},
                "validation": {**validation, "dataset_path": str(REPOSITORY / "mxtrain" / "titan" / "train.py")},
                "metrics": {"log_freq": 2, "enable_wandb": True},
            }
            (base / "command.toml").write_text(tomli_w.dumps(config))
            (base / "shell").mkdir()
            arguments = ["train", str(base / "command.toml"), "--job.dump_folder", str(folder)]
            command = Forked(cli.main, arguments, cwd=base / "shell", NGPU="1")
            command.communicate(400)
            (base / "command.status").write_text(str(command.process.exitcode))
    output = [(base / "shell" / f"{name}.txt").read_text() for name in ("stdout", "stderr")]
    return Outcome(folder, [int((base / "command.status").read_text())], output)


@dataclass(frozen=True)
class Outcome:
    folder: Path
    statuses: list[int]
    """Exit status of every rank"""
    output: list[str]
    """Stdout and stderr of every rank"""

    @property
    def rows(self) -> list[dict]:
        assert set(self.statuses) == {0}, self.output[0][-4000:]
        return list(load_run(self.folder).training)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


def done_once(
    base: Path, name: str, processes: int, runs: Runs, prepare: Callable[[], None] | None = None
) -> dict[str, Outcome]:
    """Do ``runs`` with ``launch``, unless another pytest worker of this session has."""
    with FileLock(base / f"{name}.lock"):
        if not (base / name).exists():
            copy_text(base)
            launch(base / name, runs, processes, prepare=prepare)
    outcomes = {}
    for run, flags in runs.items():
        if not (base / name / run / "rank0.status").exists():
            output = (path.read_text()[-1000:] for path in sorted((base / name).glob("*/rank*.txt")))
            raise AssertionError("\n".join([f"{run} did not run: a run before it broke the processes", *output]))
        statuses = [json.loads((base / name / run / f"rank{rank}.status").read_text()) for rank in range(processes)]
        output = [(base / name / run / f"rank{rank}.txt").read_text() for rank in range(processes)]
        flags = flags if isinstance(flags, list) else flags.flags
        own = [flag.partition("=")[2] for flag in flags if flag.startswith("--job.dump_folder=")]
        outcomes[run] = Outcome(Path(own[0]) if own else base / name / run, statuses, output)
    return outcomes


def copy_text(base: Path) -> None:
    """Copy the text that runs read. It is there at once, as a whole: other processes of the session may read it."""
    # Python's own source. With mxtrain's, every change of the code would change what the tests train on.
    with FileLock(base / "text.lock"):
        if (base / "text").exists():
            return
        for package in TEXT:
            source = Path(sysconfig.get_paths()["stdlib"]) / package
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, base / "text (being copied)" / package, ignore=ignored)
        (base / "text (being copied)").rename(base / "text")


def _write_config(path: Path, config: dict, text: Path) -> None:
    data = {**config["training"], "dataset_path": f"{text}/**/*.py"}
    path.write_text(tomli_w.dumps({**config, "training": data}))


def wait_for_lines(path: Path, count: int) -> None:
    end = time.monotonic() + 200
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < end, f"{path} has no {count} lines"
        time.sleep(0.01)


def launch(
    folder: Path,
    runs: Runs,
    processes: int,
    disturb: Callable[[list], None] | None = None,
    prepare: Callable[[], None] | None = None,
) -> None:
    """Do ``runs``, by name, one after another with ``processes`` workers and no launcher in between.

    ``disturb`` is called with the workers, which are ``multiprocessing.Process``es, when they have started.
    ``prepare``, a function of a module, is called in every worker before its first run.
    """
    folder.mkdir(parents=True)
    _write_config(folder / "job.toml", CONFIG, folder.parent / "text")
    for name, run in runs.items():
        if not isinstance(run, Resumed):
            (folder / name).mkdir()
        if isinstance(run, Configured):
            _write_config(folder / name / "job.toml", run.config, folder.parent / "text")
    environment = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        **ENVIRONMENT,
        "MXTRAIN_CACHE": str(folder.parent / "cache"),
    }
    context = forking_context()
    workers = [
        context.Process(
            target=train_all, args=(folder, runs, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, prepare)
        )
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    end = time.monotonic() + 500
    if disturb is not None:
        disturb(workers)
    for worker in workers:
        worker.join(max(0, end - time.monotonic()))
    late = [worker for worker in workers if worker.is_alive()]
    for worker in late:
        worker.kill()
    assert not late, "".join(path.read_text()[-2000:] for path in folder.glob("*/rank*.txt"))
