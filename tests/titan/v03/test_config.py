"""Settings of TorchTitan 0.2.2 under 0.3: passed on, used by mxtrain itself, or refused by name."""

from dataclasses import is_dataclass
from types import SimpleNamespace

import pytest
import torch

from mxtrain import ConfigError
from mxtrain.settings.read import read_settings
from mxtrain.settings.releases import release
from mxtrain.settings.titan import titan_fields
from mxtrain.titan.job_config import check_model_layout, parse_job_config
from mxtrain.titan.v03 import trainer
from mxtrain.titan.v03.config import trainer_config
from mxtrain.titan.v03.models import model_spec
from tests.support.jobs import with_setting

# What mxtrain's own parts read: its command, its loaders, its converters, its checkpoint manager.
OWN = {
    *("job.config_file", "job.description", "job.custom_config_module", "experimental.custom_import"),
    *("model.name", "model.flavor", "model.tokenizer_path", "model.converters"),
    *(name for name in titan_fields() if name.startswith(("training.dataset", "training.dataloader.", "validation."))),
    *("parallelism.expert_parallel_comm_backend", "activation_checkpoint.selective_ac_option"),
}


class Recorded:
    """A job config that remembers which of its settings were read."""

    def __init__(self, section, name: str, seen: set[str]):
        self._section, self._name, self._seen = section, name, seen

    def __getattr__(self, name: str):
        value, name = getattr(self._section, name), f"{self._name}.{name}".removeprefix(".")
        if is_dataclass(value):
            return Recorded(value, name, self._seen)
        self._seen.add(name)
        return value


def test_no_setting_is_ignored():
    job, seen = parse_job_config(["--model.converters=", "--compile.enable"]), set()
    parts = dict.fromkeys(("metrics", "tokenizer", "dataloader", "checkpoint", "validator"))
    for mode in ("selective", "memory_budget"):
        job = with_setting(job, "activation_checkpoint.mode", mode)
        trainer_config(Recorded(job, "", seen), model_spec(job), parts)
    assert titan_fields().keys() - seen - OWN - release().gone.keys() == {"memory_estimation.enable"}


def test_values_arrive():
    flags = ["--training.steps=7", "--optimizer.lr=1e-4", "--optimizer.beta2=0.99", "--profiling.profile_freq=3"]
    job = parse_job_config(["--model.converters=", *flags, "--job.dump_folder=here", "--checkpoint.interval=9"])
    parts = [["tok_embeddings", "layers.0"], ["norm", "output"]]
    job = with_setting(job, "parallelism.module_fqns_per_model_part", parts)
    config = trainer_config(
        job, model_spec(job), dict.fromkeys(("metrics", "tokenizer", "dataloader", "checkpoint", "validator"))
    )
    (group,) = config.optimizer.param_groups
    assert group.optimizer_kwargs["lr"] == 1e-4 and group.optimizer_kwargs["betas"] == (0.9, 0.99)
    assert (config.training.steps, config.profiler.profile_freq, config.checkpoint.interval) == (7, 3, 9)
    assert config.dump_folder == "here" and config.loss.global_vocab_size == 2048
    assert config.parallelism.module_fqns_per_model_part == [["tok_embeddings", "layers.0"], ["norm", "lm_head"]]


@pytest.mark.parametrize(
    "flag, instead",
    [
        ("--parallelism.expert_tensor_parallel_degree=2", "expert_parallel_degree"),
        ("--parallelism.disable_loss_parallel", "always parallel"),
        ("--fault_tolerance.enable", "torchft has a trainer of its own"),
        ("--activation_checkpoint.selective_ac_option=3", "set it to 'op'"),
    ],
)
def test_what_03_does_not_have_is_refused_by_name(flag, instead):
    name = flag[2:].partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{name} .*{instead}"):
        parse_job_config(["--model.converters=", flag])


def test_context_parallelism_is_refused():
    """By mxtrain: 0.3's own models have it, for scaled dot product attention and for flex attention."""
    settings = read_settings(["--model.converters=", "--parallelism.context_parallel_degree=2"])
    message = "^parallelism.context_parallel_degree = 2 is not supported with TorchTitan 0.3: allowed is 1$"
    with pytest.raises(ConfigError, match=message):
        check_model_layout(settings)


def test_validation_on_a_dataset_of_torchtitan_is_refused():
    flags = ["--model.converters=", "--validation.enable", "--training.dataset=c4"]
    with pytest.raises(ConfigError, match="^validation.dataset = 'c4' is not one of: 'python', 'files', 'hf'"):
        parse_job_config([*flags, "--validation.dataset=c4"])
    parse_job_config([*flags, "--validation.dataset=python"])


@pytest.mark.parametrize("stages, parts", [(False, [8, 8]), (True, [4, 4, 4, 4])])
def test_validation_has_its_own_batch_size(stages, parts, monkeypatch):
    batches = [({"input": torch.zeros(8, 2)}, torch.zeros(8, 2))] * 2
    monkeypatch.setattr(trainer, "build_validation_loader", lambda *_: batches)
    job = parse_job_config(["--model.converters=", "--validation.local_batch_size=8"])
    given = dict(seq_len=2, local_batch_size=2)  # of training
    layout = dict(parallelism=job.parallelism, parallel_dims=SimpleNamespace(pp_enabled=stages))
    validator = trainer.HeldOutValidator(job, dp_world_size=1, dp_rank=0, tokenizer=None, **given, **layout)
    assert [len(labels) for _, labels in validator.dl_config.build(**given)] == parts
