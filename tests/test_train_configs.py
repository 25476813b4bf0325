"""Parses every committed config as training does, and as TorchTitan without mxtrain does."""

from functools import cache
from pathlib import Path

import pytest
import tomli

import mxtrain.titan  # noqa: F401  registers flavors
from mxtrain.config import dump_config, load_config
from mxtrain.data.config import DATASETS
from mxtrain.settings.read import read_settings
from mxtrain.titan.job_config import check_model_layout, parse_job_config
from tests.support.releases import only_022

FOLDER = Path(__file__).parents[1] / "train_configs"
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.toml"))
LLAMAS = ("debug", "125m", "1b", "8b", "70b")
VARIANTS = {
    "_p1": {"mxnorm": {"p": 1}},
    "_mx_linear": {"model": {"converters": ["mx_linear"]}},
    "_bf16": {"model": {"converters": []}},
    "_fused_rmsnorm": {"model": {"converters": ["fused_norm"]}},
    "_nvfp4": {"mxnorm": {"recipe": "nvfp4"}},
    "_schedule": {"mxnorm": {"recipe": "nvfp4", "schedule": [{"from_share": 0.9, "recipe": "fprop=bf16"}]}},
    "_mixed": {
        "mxnorm": {
            "recipe": "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8",
            "recipes": {"layers.*.feed_forward.w2": "mxfp8", "layers.0": "bf16"},
        }
    },
}
# Converters of the configs without variants.
CONVERTERS = {
    "deepseek_v3_debug": ["decompose_k_router"],
    "deepseek_v3_16b": ["mxnorm", "decompose_k_router"],
    "qwen3_moe_debug": ["mxnorm", "decompose_k_router"],
    "qwen3_30b_a3b": ["mxnorm", "decompose_k_router"],
}
SIZES_OF = dict.fromkeys(VARIANTS, LLAMAS) | {
    "_fused_rmsnorm": ("debug", "125m"),
    "_nvfp4": ("debug", "125m"),
    "_schedule": ("debug",),
    "_mixed": ("debug",),
}
CHANGES = {f"llama3_{size}{variant}": VARIANTS[variant] for variant, sizes in SIZES_OF.items() for size in sizes}


@cache
def parse(name):
    """The job config of a committed config. Tests share it and must not change it."""
    return parse_job_config(file_of(name))


def file_of(name: str) -> list[str]:
    return ["--job.config_file", str(FOLDER / f"{name}.toml")]


def test_the_folder_holds_exactly_these_configs():
    llamas = {f"llama3_{size}" for size in LLAMAS}
    assert set(CONFIGS) == {"qwen3_debug", *CONVERTERS, *llamas, *CHANGES}


def test_a_variant_contains_only_its_changes():
    for name, changes in CHANGES.items():
        written = tomli.loads((FOLDER / f"{name}.toml").read_text())
        base = "_".join(name.split("_")[:2])
        assert written == {"extends": f"{base}.toml", **changes}, name


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_parses_to_its_variant_with_settings_that_fit(name):
    """One test for both, because parsing takes most of the time."""
    job_config = parse(name)
    changes = CHANGES.get(name, {})
    converters = CONVERTERS.get(name, ["mxnorm"])
    assert job_config.model.converters == changes.get("model", {}).get("converters", converters)
    mxnorm = {"p": 2, "recipe": "mxfp8", "recipes": {}} | changes.get("mxnorm", {})
    assert {field: getattr(job_config.mxnorm, field) for field in mxnorm} == mxnorm
    training, validation = job_config.training, job_config.validation
    assert training.dataset in DATASETS and validation.dataset == ""
    # TorchTitan computes the rotary embedding up to the training length.
    assert validation.seq_len <= training.seq_len
    # Another batch size would compile every block again.
    assert validation.local_batch_size == training.local_batch_size
    assert validation.freq <= training.steps
    assert job_config.lr_scheduler.warmup_steps < training.steps
    assert job_config.metrics.enable_wandb == ("debug" not in name)


# A variant makes the same changes at every size, so the default run takes each variant at one size.
@only_022
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sweep if name in CHANGES and "debug" not in name else ())
        for name in CONFIGS
    ],
)
def test_torchtitan_without_mxtrain_parses_the_resolved_config(name, tmp_path):
    from torchtitan.config import ConfigManager

    dump_config(load_config(FOLDER / f"{name}.toml"), tmp_path / "resolved.toml")
    alone = ConfigManager().parse_args(["--job.config_file", str(tmp_path / "resolved.toml")])
    assert alone.experimental.custom_import == "mxtrain.titan"
    alone.job.config_file = parse(name).job.config_file
    assert alone.to_dict() == parse(name).to_dict()


def test_settings_of_each_llama_size():
    for size in LLAMAS:
        job_config = parse(f"llama3_{size}")
        on_gpu = size != "debug"
        assert job_config.compile.enable == on_gpu
        assert job_config.data.installed == on_gpu
        assert job_config.training.mixed_precision_param == ("bfloat16" if on_gpu else "float32")
        assert job_config.checkpoint.enable == (size in ("8b", "70b"))
    modes = [parse(f"llama3_{size}").activation_checkpoint.mode for size in LLAMAS]
    assert modes == ["none", "none", "none", "selective", "selective"]
    layouts = [parse(f"llama3_{size}").parallelism for size in LLAMAS]
    assert [(p.tensor_parallel_degree, p.pipeline_parallel_degree) for p in layouts] == [(1, 1)] * 4 + [(8, 2)]


def test_settings_of_mixtures_of_experts():
    for name in CONVERTERS:
        job_config = parse(name)
        on_gpu = not name.endswith("_debug")
        assert job_config.compile.enable == job_config.data.installed == job_config.checkpoint.enable == on_gpu
        assert job_config.training.mixed_precision_param == ("bfloat16" if on_gpu else "float32")
        check_model_layout(read_settings(file_of(name)))  # every process has as many experts
        assert job_config.parallelism.expert_parallel_degree == (8 if on_gpu else 1)
