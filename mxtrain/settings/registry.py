"""The names of models, flavors, converters and datasets, without importing the packages that register them."""

from collections.abc import Iterable

from mxtrain.data.config import DATASETS

_LLAMA3 = ("debugmodel", "debugmodel_flex_attn", "debugmodel_varlen_attn", "8B", "8B_flex", "8B_varlen", "70B", "405B")

FLAVORS = {
    "llama3": (*_LLAMA3, "125M", "1B", "3.2-1B", "3.2-3B"),
    "llama4": (
        "debugmodel",
        "17bx16e",
        "17bx128e",
        "debugmodel_irope",
        "17bx16e_irope",
        "17bx128e_irope",
    ),
    "qwen3": (
        "debugmodel",
        "0.6B",
        "1.7B",
        "4B",
        "8B",
        "14B",
        "32B",
        "debugmodel_moe",
        "30B-A3B",
        "235B-A22B",
        "debugmodel_moe_16",
    ),
    "deepseek_v3": ("debugmodel", "debugmodel_flex_attn", "16B", "236B", "671B"),
    "gpt_oss": ("debugmodel", "20b", "120b"),
    "llama3_ft": _LLAMA3,
}
"""Name of a model -> its flavors"""

QUANTIZING_CONVERTERS = ("mxnorm", "mx_linear")
NORM_CONVERTERS = ("fused_norm", "fused_rmsnorm")
ROUTER_CONVERTER = "decompose_k_router"
TITAN_QUANTIZING = "quantize."
"""How the names of TorchTitan's own converters begin"""
CONVERTERS = (
    *QUANTIZING_CONVERTERS,
    *NORM_CONVERTERS,
    ROUTER_CONVERTER,
    "quantize.linear.float8",
    "quantize.grouped_mm.float8",
    "quantize.linear.mx",
    "quantize.grouped_mm.mx",
)


def quantizing_among(converters: Iterable[str]) -> list[str]:
    """Return the names of mxtrain's quantizing converters among ``converters``."""
    return [name for name in converters if name in QUANTIZING_CONVERTERS]


TITAN_DATASETS = ("c4", "c4_test", "c4_validation")
ALL_DATASETS = (*DATASETS, *TITAN_DATASETS)


def validation_dataset(training: str, validation: str) -> str:
    """Return the dataset that is validated on: ``validation``, or if that is "", the one that ``training`` leads to.

    Documents are held out of mxtrain's datasets, and TorchTitan's have a split of their own. It is "" for a dataset of
    the user's, of which nothing is known.
    """
    if validation or training in DATASETS:
        return validation or training
    return "c4_validation" if training in TITAN_DATASETS else ""


PIPELINE_SCHEDULES = (
    "1F1B",
    "Interleaved1F1B",
    "GPipe",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "PipelineScheduleSingle",
    "PipelineScheduleMulti",
    "ZBVZeroBubble",
    "DualPipeV",
)
