"""What a run says about its start, and the settings in its folder."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import tomli
import tomli_w
import torch

from mxtrain.checkpoints.manifest import Manifest, write_manifest
from mxtrain.checkpoints.start import Start
from mxtrain.ranks import CommonError
from mxtrain.settings.known import resolved_settings, settings_of
from mxtrain.titan import run_start
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.run_start import begin_run, other_versions, require_same_settings, write_resolved_config


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


@pytest.mark.parametrize("flag, is_told", [("--checkpoint.no-enable", True), ("--checkpoint.enable", False)])
def test_a_run_without_checkpoints_says_so(monkeypatch, flag, is_told):
    lines = []
    monkeypatch.setattr(run_start, "verified_start", lambda *_: Start(notes=("starts",)))
    monkeypatch.setattr(run_start.terminal, "note", lines.append)
    begin_run(parse_job_config([flag]), None, None)
    why = "no checkpoints: nothing can resume or export this run; --checkpoint.enable saves checkpoints"
    assert lines == ["starts", why][: 1 + is_told]


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
    lines = []
    monkeypatch.setattr(run_start, "verified_start", lambda *arguments: Start())
    monkeypatch.setattr(run_start.terminal, "note", lines.append)
    begin_run(job_config, None, None)
    where = "'mxtrain export', 'eval' and 'generate' will refuse this run"
    assert lines == ([f"{where}: a {name} with {problem} has no counterpart in transformers"] if problem else [])
    job_config.model.name = "own"  # a user's, whose sizes nobody looks up
    begin_run(job_config, None, None)
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
    write_resolved_config(parse_job_config(["--job.config_file=run/config.toml", "--job.dump_folder=run"]))
    kept = job if named in ("run", f"{tmp_path}/run", "link") else {}
    expected = {"debug": {"seed": 3}} | ({"job": kept} if kept else {})
    assert tomli.loads(Path("run/config.toml").read_text()) == expected


COMMON = ["--model.converters=mxnorm", "--training.local_batch_size=2", "--optimizer.lr=1e-3"]


def compare(*flags: str) -> None:
    """Compare the settings of this rank with rank 0's, which has other flags."""
    own = parse_job_config([*COMMON, *flags])
    require_same_settings(settings_of(own), resolved_settings(own))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--mxnorm.p=1"], "^mxnorm.p = 1, but 2 on rank 0: start all nodes with the same config and flags$"),
        (["--parallelism.tensor_parallel_degree=2"], "tensor_parallel_degree = 2, but 1 on rank 0"),
        (["--training.local_batch_size=4"], "training.global_batch_size = 8, but 4 on rank 0"),
        (["--training.seq_len=64", "--debug.seed=1"], "^training.seq_len = 64, .*; these differ, too: debug.seed"),
        (["--data.cache_dir=/scratch", "--metrics.log_freq=3", "--job.dump_folder=/home/run"], ""),
        (["--training.dataset=files", "--training.dataset_path=/local/1.txt"], ""),  # whose hashes are compared
    ],
)
def test_settings_that_must_be_the_same_and_others(monkeypatch, flags, message):
    texts = ["--training.dataset=files", "--training.dataset_path=/local/0.txt"] if "dataset" in flags[0] else []
    first = resolved_settings(parse_job_config([*COMMON, *texts]))
    monkeypatch.setattr(run_start, "from_first_rank", lambda work: first)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(CommonError, match=message) if message else nullcontext():
        compare(*flags)
