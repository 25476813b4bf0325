"""Every committed config is read as training reads it, and as TorchTitan alone reads it."""

from pathlib import Path

import pytest
import tomli
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

import mxtrain.titan  # noqa: F401  registers flavors
from mxtrain.config import dump_config, load_config
from mxtrain.data.config import DATASETS
from mxtrain.titan.train import parse_job_config

FOLDER = Path(__file__).parents[1] / "train_configs"
CONFIGS = sorted(FOLDER.glob("*.toml"))
LLAMAS = ("debug", "125m", "1b", "8b", "70b")
VARIANTS = {
    "_p1": {"mxnorm": {"p": 1}},
    "_mx_linear": {"model": {"converters": ["mx_linear"]}},
    "_bf16": {"model": {"converters": []}},
    "_fused_rmsnorm": {"model": {"converters": ["fused_rmsnorm"]}},
    "_nvfp4": {"mxnorm": {"recipe": "nvfp4"}},
    "_mixed": {
        "mxnorm": {
            "recipe": "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8",
            "recipes": {"layers.*.feed_forward.w2": "mxfp8", "layers.0": "bf16"},
        }
    },
}
# Converters of the configs that are no variant of a Llama's.
CONVERTERS = {
    "deepseek_v3_debug": ["decompose_k_router"],
    "deepseek_v3_16b": ["decompose_k_router"],
    "qwen3_moe_debug": ["mxnorm", "decompose_k_router"],
}
SIZES_OF = dict.fromkeys(VARIANTS, LLAMAS) | {
    "_fused_rmsnorm": ("debug", "125m"),
    "_nvfp4": ("debug", "125m"),
    "_mixed": ("debug",),
}


def parse(name):
    return parse_job_config(["--job.config_file", str(FOLDER / f"{name}.toml")])


def test_the_configs_are_these():
    names = {"qwen3_debug", *CONVERTERS} | {f"llama3_{size}" for size in LLAMAS}
    names |= {f"llama3_{size}{variant}" for variant, sizes in SIZES_OF.items() for size in sizes}
    assert {path.stem for path in CONFIGS} == names


@pytest.mark.parametrize(
    ("variant", "size"), [(variant, size) for variant, sizes in SIZES_OF.items() for size in sizes]
)
def test_a_variant_holds_only_what_it_changes(size, variant):
    written = tomli.loads((FOLDER / f"llama3_{size}{variant}.toml").read_text())
    assert written == {"extends": f"llama3_{size}.toml", **VARIANTS[variant]}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_parses_to_the_variant_in_its_name(path):
    job_config = parse(path.stem)
    expected = next((changes for variant, changes in VARIANTS.items() if path.stem.endswith(variant)), {})
    converters = CONVERTERS.get(path.stem, ["mxnorm"])
    assert job_config.model.converters == expected.get("model", {}).get("converters", converters)
    assert job_config.mxnorm.p == expected.get("mxnorm", {}).get("p", 2)
    assert job_config.mxnorm.recipe == expected.get("mxnorm", {}).get("recipe", "mxfp8")
    assert job_config.mxnorm.recipes == expected.get("mxnorm", {}).get("recipes", {})
    assert job_config.model.flavor in get_train_spec(job_config.model.name).model_args


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_torchtitan_alone_reads_the_resolved_config(path, tmp_path):
    dump_config(load_config(path), tmp_path / "resolved.toml")
    alone = ConfigManager().parse_args(["--job.config_file", str(tmp_path / "resolved.toml")])
    ours = parse(path.stem)
    assert alone.experimental.custom_import == "mxtrain.titan"
    alone.job.config_file = ours.job.config_file
    assert alone.to_dict() == ours.to_dict()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_settings_fit_together(path):
    job_config = parse(path.stem)
    training, validation = job_config.training, job_config.validation
    assert training.dataset in DATASETS and validation.dataset in DATASETS
    # TorchTitan makes its rotary embedding for the training length only.
    assert validation.seq_len <= training.seq_len
    # Another batch size would compile every block once more.
    assert validation.local_batch_size == training.local_batch_size
    assert validation.freq <= training.steps
    assert job_config.lr_scheduler.warmup_steps < training.steps
    # mxnorm supports neither yet.
    assert job_config.parallelism.tensor_parallel_degree == job_config.parallelism.pipeline_parallel_degree == 1
    assert job_config.metrics.enable_wandb


def test_what_the_sizes_need():
    for size in LLAMAS:
        job_config = parse(f"llama3_{size}")
        on_gpu = size != "debug"
        assert job_config.compile.enable == on_gpu
        assert job_config.data.installed == on_gpu
        assert job_config.training.mixed_precision_param == ("bfloat16" if on_gpu else "float32")
        assert job_config.checkpoint.enable == (size in ("8b", "70b"))
    modes = [parse(f"llama3_{size}").activation_checkpoint.mode for size in LLAMAS]
    assert modes == ["none", "none", "none", "selective", "full"]


def test_what_mixtures_of_experts_need():
    for name in CONVERTERS:
        job_config = parse(name)
        on_gpu = not name.endswith("_debug")
        assert job_config.compile.enable == job_config.data.installed == job_config.checkpoint.enable == on_gpu
        assert job_config.training.mixed_precision_param == ("bfloat16" if on_gpu else "float32")
        args = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
        assert args.moe_args.num_experts % job_config.parallelism.expert_parallel_degree == 0
    assert parse("deepseek_v3_16b").parallelism.expert_parallel_degree == 8
