"""Tensor parallelism of swapped modules, under both releases of TorchTitan: what norms gather, and what is refused."""

from collections.abc import Iterable
from dataclasses import replace

import torch.nn as nn

from mxtrain.errors import ConfigError
from mxtrain.formats.hardware import MERGED
from mxtrain.formats.mx.merged import GROUP
from mxtrain.formats.recipe import LinearRecipe
from mxtrain.launch.pytorch import CheckpointWrapper
from mxtrain.nn.experts import QuantizedExperts, weight_names
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLinear

DEGREE = "parallelism.tensor_parallel_degree"
WHOLE_FEATURES = 8
"""PyTorch's grouped products take rows of 16 bytes each, which are 8 features in bf16"""


def no_split(fqn: str, module: nn.Module, how: str, processes: int) -> ConfigError:
    """The error for a swapped module that a layout splits in a way that it has no counterpart for."""
    return ConfigError(
        f"{DEGREE} = {processes} splits {fqn}, an {type(module).__name__}, by {how}, which only works in high "
        "precision; set it to 1, or name the module in mxnorm.filter_fqns"
    )


def choose_gathers(model: nn.Module, gather: str) -> None:
    """Tell every norm whose sequences are split what it sends ("mxnorm.gather"), and how often its forward runs.

    Layers are wrapped for activation checkpointing before this is called.
    """
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    repeated = {module for wrapper in wrappers for module in wrapper.modules()}
    for module in model.modules():
        if isinstance(module, MXNorm) and module.split is not None:
            # The gate of a mixture reads x itself.
            sent = "high_precision" if module.feeds_mixture else gather
            module.split = replace(module.split, gather=sent, forwards=2 if module in repeated else 1)


def check_part(fqn: str, linear: QuantizedLinear, by_output: bool, processes: int) -> None:
    """Raise ConfigError unless every process's part of a linear is whole blocks, and a bias is added once.

    The linear is split ``by_output`` features, or else by input features.
    """
    if linear.bias is not None and not by_output:
        raise ConfigError(
            f"{DEGREE} = {processes} splits {fqn} by input features, and every process would add its bias; set it to "
            "1, or name the module in mxnorm.filter_fqns"
        )
    name = "out_features" if by_output else "in_features"
    features = getattr(linear, name)
    if linear.mode == MERGED and (features // processes) % GROUP:
        raise ConfigError(
            f"{DEGREE} = {processes} splits {name} = {features} of {fqn} into parts that are not whole groups of "
            f"{GROUP} (mxnorm.mode = {MERGED!r}); use another degree or mode"
        )
    check_blocks(f"{name} = {features} of {fqn}", features, processes, linear.recipes)


def check_part_of_experts(experts: nn.Module, processes: int) -> None:
    """Raise ConfigError unless every process's part of the experts' hidden features is whole rows of products."""
    features = getattr(experts, weight_names(experts)[0]).shape[1]
    if features % (processes * WHOLE_FEATURES):
        raise ConfigError(
            f"{DEGREE} = {processes} splits the {features} hidden features of every expert into parts that are not "
            f"multiples of {WHOLE_FEATURES}, which grouped products need; allowed is a divisor of "
            f"{features // WHOLE_FEATURES}"
        )
    if isinstance(experts, QuantizedExperts):
        check_blocks(f"the {features} hidden features of every expert", features, processes, experts.recipes)


def check_blocks(what: str, features: int, processes: int, recipes: Iterable[LinearRecipe]) -> None:
    """Raise ConfigError unless ``features``, called ``what``, are whole blocks of the recipes on every process."""
    for recipe in recipes:
        block = max((gemm.block_size for gemm in recipe.gemms if gemm.format is not None), default=1)
        if features % (processes * block):
            raise ConfigError(
                f"{DEGREE} = {processes} splits {what} into parts that are not whole blocks of {block} "
                f"(recipe {recipe.name!r}); allowed is a divisor of {features // block}"
            )
