"""Settings of the nodes of a run, each of which has a launcher and a command of its own."""

import pytest
import torch
from torchtitan import train as titan

from mxtrain import ConfigError
from mxtrain.titan import same_settings, trainer
from mxtrain.titan.parse import parse_job_config, resolved_settings
from mxtrain.titan.same_settings import require_same_settings

COMMON = ["--model.converters=mxnorm", "--training.local_batch_size=2", "--optimizer.lr=1e-3"]


def compare(monkeypatch, *flags_of_nodes: list[str]) -> None:
    """Compare the settings of nodes with two ranks each, as the first rank."""
    jobs = [parse_job_config([*COMMON, *flags]) for flags in flags_of_nodes]

    def exchange(work):
        results = [work(), *(resolved_settings(job) for job in jobs[1:])]
        return [
            {"node": f"host{number}", "result": result}
            for number, of_first in enumerate(results)
            for result in (of_first, None)
        ]

    monkeypatch.setattr(same_settings, "run_on_all_ranks", exchange)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2 * len(jobs))
    require_same_settings(jobs[0])


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--optimizer.lr=1e-2"],
            "optimizer.lr = 0.01 on node host1, but 0.001 on node host0: start all nodes with th",
        ),
        (["--mxnorm.p=1"], "mxnorm.p = 1 on node host1, but 2 on node host0"),
        (["--parallelism.tensor_parallel_degree=2"], "tensor_parallel_degree = 2 on node host1, but 1 on node host0"),
        (["--training.local_batch_size=4"], "training.global_batch_size = 16 on node host1, but 8 on node host0"),
        (
            ["--training.seq_len=64", "--debug.seed=1"],
            "training.seq_len = 64 .* same config and flags; these differ, too: debug.seed",
        ),
    ],
)
def test_another_setting_on_one_node_is_refused(monkeypatch, flags, message):
    with pytest.raises(ConfigError, match=message) as raised:
        compare(monkeypatch, [], flags)
    assert "\n" not in str(raised.value)


def test_folders_and_logs_may_differ(monkeypatch):
    compare(monkeypatch, [], ["--data.cache_dir=/scratch", "--metrics.log_freq=3", "--job.dump_folder=/home/run"])
    paths = ["--training.dataset=files", "--training.dataset_path"]
    compare(monkeypatch, [*paths, "/local/0.txt"], [*paths, "/local/1.txt"])  # whose hashes are compared


def test_ranks_compare_their_settings_as_soon_as_they_meet(monkeypatch):
    one, compared = object.__new__(trainer.Trainer), []
    one.job_config = "job"
    monkeypatch.setattr(titan.Trainer, "init_distributed", lambda self: "dims")
    monkeypatch.setattr(trainer, "require_same_settings", compared.append)
    monkeypatch.setattr(trainer, "begin_run", lambda job_config: (compared.copy(), []))
    assert one.init_distributed() == "dims"
    assert one._start == ["job"], "compared before the run's folder is read"
