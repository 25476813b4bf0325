"""Where a run starts on all ranks and nodes, what it says about that, and the settings in its folder."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import tomli
import tomli_w
import torch

from mxtrain import ranks
from mxtrain.checkpoints.folder import Manifest, file_record, write_manifest
from mxtrain.checkpoints.run_folder import locked
from mxtrain.checkpoints.start import Start, find_start
from mxtrain.errors import ConfigError
from mxtrain.ranks import CommonError
from mxtrain.settings.read import read_settings
from mxtrain.titan import run_start
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.run_start import begin_run, other_versions, require_same_settings, write_resolved_config
from tests.support.jobs import with_setting


def test_versions_that_have_changed_are_named(tmp_path, monkeypatch):
    checkpoint = tmp_path / "step-5"
    checkpoint.mkdir()
    write_manifest(checkpoint, Manifest(5, True, {}, versions={"torch": "2.11.0", "triton": None, "gone": "1"}))
    versions = {"torch": "2.13.0", "triton": None, "new": "1"}
    monkeypatch.setattr("mxtrain.titan.run_start.package_versions", lambda: versions)
    assert other_versions(Start(5, (), checkpoint)) == [
        "since this checkpoint versions have changed: torch 2.11.0 to 2.13.0"
    ]
    versions = {"torch": "2.11.0"}
    assert other_versions(Start(5, (), checkpoint)) == other_versions(Start(0)) == []


def notes_of_starts(monkeypatch, start: Start) -> list[str]:
    """The lines that ``begin_run`` shows from now on, in a single process."""
    lines = []
    monkeypatch.setattr(run_start, "_same_on_all_nodes", lambda *_: start)
    monkeypatch.setattr(run_start, "from_first_rank", lambda work: [])
    monkeypatch.setattr(run_start.terminal, "note", lines.append)
    return lines


NO_BIAS = "--model_args.load_balance_coeff=0"


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["qwen3", "debugmodel_moe_16"], "load_balance_coeff = 0.001"),
        (["qwen3", "debugmodel_moe_16", NO_BIAS], None),
        (["qwen3", "debugmodel"], None),
        (["deepseek_v3", "16B"], "score_func = 'softmax', norm_eps = 1e-05"),
        (["deepseek_v3", "671B", "--model_args.norm_eps=1e-6"], None),
    ],
)
def test_a_model_that_cannot_be_exported_is_named_before_it_trains(flags, problem, tmp_path, monkeypatch):
    name, flavor, *more = flags
    job_config = parse_job_config([f"--model.name={name}", f"--model.flavor={flavor}", "--checkpoint.enable", *more])
    lines = notes_of_starts(monkeypatch, Start())
    begin_run(job_config, dict, None)
    where = "'mxtrain export', 'eval' and 'generate' will refuse this run"
    assert lines == ([f"{where}: a {name} with {problem} has no counterpart in transformers"] if problem else [])
    own = with_setting(job_config, "model.name", "own")  # a user's, whose sizes nobody looks up
    begin_run(own, dict, None)
    assert len(lines) == bool(problem)


@pytest.mark.parametrize("named", ["run", "{tmp}/run", "link", "other", "gone", "", None])
def test_a_config_that_names_its_own_folder_goes_on_to_do_so(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "other"):
        Path(folder).mkdir()
    Path("link").symlink_to("run")
    named = named and named.format(tmp=tmp_path)
    job = {} if named is None else {"dump_folder": named}
    Path("run/config.toml").write_text(tomli_w.dumps({"job": job, "debug": {"seed": 3}}))
    write_resolved_config(Path("run"), read_settings(["--job.config_file=run/config.toml", "--job.dump_folder=run"]))
    kept = job if named in ("run", f"{tmp_path}/run", "link") else {}
    expected = {"debug": {"seed": 3}} | ({"job": kept} if kept else {})
    assert tomli.loads(Path("run/config.toml").read_text()) == expected


COMMON = ["--model.converters=mxnorm", "--training.local_batch_size=2", "--optimizer.lr=1e-3"]


def compare(*flags: str) -> None:
    """Compare the settings of this rank with rank 0's, which has other flags."""
    require_same_settings(read_settings([*COMMON, *flags]))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--mxnorm.p=1"], "^mxnorm.p = 1, but 2 on rank 0; start all nodes with the same config and flags$"),
        (["--parallelism.tensor_parallel_degree=2"], "tensor_parallel_degree = 2, but 1 on rank 0"),
        (["--training.local_batch_size=4"], "training.global_batch_size = 8, but 4 on rank 0"),
        (["--training.seq_len=64", "--debug.seed=1"], "^training.seq_len = 64, .*; these differ, too: debug.seed"),
        (["--data.cache_dir=/scratch", "--metrics.log_freq=3", "--job.dump_folder=/home/run"], ""),
        (["--training.dataset=files", "--training.dataset_path=/local/1.txt"], ""),  # whose hashes are compared
    ],
)
def test_settings_that_must_be_the_same_and_others(monkeypatch, flags, message):
    texts = ["--training.dataset=files", "--training.dataset_path=/local/0.txt"] if "dataset" in flags[0] else []
    first = read_settings([*COMMON, *texts]).resolved()
    monkeypatch.setattr(run_start, "from_first_rank", lambda work: first)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(CommonError, match=message) if message else nullcontext():
        compare(*flags)


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begin a run without a process group. ``begin.lines`` is what it says."""

    def begin(*flags: str, run: Path = tmp_path, rank: int = 0, processes: int = 1) -> Start:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
        job_config = parse_job_config([f"--job.dump_folder={run}", "--checkpoint.enable", *flags])
        find = partial(find_start, run, job_config.checkpoint, 1)
        begin.lines.clear()
        return begin_run(job_config, find, find())

    begin.lines = []
    monkeypatch.setattr(run_start.terminal, "note", begin.lines.append)
    return begin


VERIFY = "--checkpoint.verify"


def save(run: Path, step: int, files: int = 2, with_hashes: bool = True) -> Path:
    path = run / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    for number in range(files):
        (path / f"f{number}").write_bytes(b"content")
    records = {file.name: file_record(file, with_hashes) for file in path.iterdir()}
    write_manifest(path, Manifest(step, True, records))
    return path


def flip(path: Path) -> None:
    path.write_bytes(b"cOntent")  # the size is right


def test_with_verify_a_checkpoint_with_other_content_is_refused(tmp_path, begin):
    five, ten = (save(tmp_path / "run", step) for step in (5, 10))
    flip(ten / "f1")
    start = begin(run=tmp_path / "run")
    assert start.step == 10 and begin.lines == list(start.notes)
    of_another = (f"--checkpoint.initial_load_path={ten}",)
    for run, flags in (("run", ()), ("run", ("--checkpoint.load_step=10",)), ("new", of_another)):
        with pytest.raises(ConfigError) as error:
            begin(VERIFY, *flags, run=tmp_path / run)
        assert str(error.value) == (
            f"checkpoint.verify: {ten} cannot be loaded: f1 has other content than was saved; name another checkpoint "
            "with checkpoint.load_step, or move this one away"
        )
    start = begin(VERIFY, "--checkpoint.load_step=5", run=tmp_path / "run")
    assert (start.checkpoint, start.abandoned) == (five, (ten,)) and ten.is_dir()  # until the trainer has loaded step 5


def test_ranks_share_the_files_that_they_verify(tmp_path, monkeypatch, begin):
    read = []
    monkeypatch.setattr(run_start, "check_hashes", lambda checkpoint, manifest, names: read.extend(names))
    save(tmp_path, 5, files=5)
    for rank in range(3):
        begin(VERIFY, rank=rank, processes=3)
    assert sorted(read) == ["f0", "f1", "f2", "f3", "f4"]


def test_a_checkpoint_without_hashes_is_loaded_and_named(tmp_path, begin):
    path = save(tmp_path / "run", 5, with_hashes=False)
    assert begin(VERIFY, run=tmp_path / "run").step == 5
    assert begin.lines[1:] == [f"checkpoint.verify: {path} was saved without hashes, so only sizes are compared"]
    assert begin(VERIFY, run=tmp_path / "new").step == 0 and begin.lines == []
    assert not (tmp_path / "new").exists()


@pytest.fixture
def second_node(monkeypatch):
    """A function that adds a rank on node "b". It takes what this rank finds, and returns what the other one does."""

    def add(sees):
        monkeypatch.setattr(run_start, "LATE_SECONDS", (0.0, 0.0, 0.0))
        monkeypatch.setattr(
            ranks, "_exchange", lambda mine: [mine, {**mine, "node": "b", "result": sees(mine["result"])}]
        )
        monkeypatch.setattr(ranks, "this_node", lambda: "a")

    return add


def require_refusal(begin, run: Path, message: str) -> None:
    """The run is refused, and nothing in its folder has moved."""
    before = sorted(run.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        begin()
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize(
    "seen, message",
    [
        ("step-3", "node b from step-3; all nodes must see the same"),
        ("no checkpoint", "node b from no checkpoint"),
        ("step-6", "node b from step-6; all nodes must"),
    ],
)
def test_nodes_that_see_other_checkpoints_are_refused(tmp_path, begin, second_node, seen, message):
    """They would train on with a mixture of both."""
    save(tmp_path, 3)
    save(tmp_path, 6)
    second_node(lambda mine: mine | {"name": seen, "sha256": "abc"} if "sha256" in mine else mine)
    require_refusal(begin, tmp_path, f"node a would start from step-6 and {message}")


@pytest.mark.parametrize("owner", [None, "123 b"])
def test_nodes_with_folders_of_their_own_are_refused(tmp_path, begin, second_node, owner):
    """Each would save its own part of every checkpoint."""
    with locked(tmp_path):
        second_node(lambda mine: mine | {"lock": owner} if "lock" in mine else mine)
        require_refusal(begin, tmp_path, "no checkpoint and node b from no checkpoint; all")
        second_node(lambda mine: mine)
        assert begin().step == 0


def test_a_node_that_sees_a_checkpoint_late_starts_from_it(tmp_path, begin, second_node):
    save(tmp_path, 6)
    looks = []

    def sees(mine):
        if mine and "sha256" in mine:
            looks.append(mine)
            return mine if len(looks) == 3 else mine | {"name": "no checkpoint", "sha256": None}
        return mine

    second_node(sees)
    assert begin().step == 6 and len(looks) == 3
