"""How an export writes its weights: a format turns each weight of a run into tensors of a safetensors file.

``mxtrain export`` reads the weights one after another. It hands every weight to the format together with the order of
rows that Hugging Face expects: TorchTitan and Hugging Face store the rows of Llama's wq and wk in different orders.
Training cast a weight in TorchTitan's order, so a format casts first and then puts the rows of its codes and scales
into Hugging Face's order. Blocks along columns do not notice the difference; tiles of 16 x 16 elements do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mxtrain.recipes.recipe import LinearRecipe

RowOrder = Callable[[torch.Tensor], torch.Tensor]
"""Puts the rows of a tensor, its first dimension, into Hugging Face's order. They must be all rows of the weight."""


@dataclass(frozen=True)
class RunFacts:
    """What a format may have to know about the run."""

    recipes: Mapping[str, LinearRecipe | None]
    """FQN in TorchTitan of every linear, such as "layers.0.attention.wq" -> its recipe; None in high precision"""
    merged_norms: frozenset[str]
    """FQNs of the norms whose gain training folded into the next weights: the MXNorms of this step"""
    names: Mapping[str, tuple[str, ...]]
    """FQN of every parameter -> its names in Hugging Face: one, or one for each expert; none if it is left out"""
    shapes: Mapping[str, tuple[int, ...]]
    """FQN of every parameter -> its shape in TorchTitan"""
    weight_dtype: torch.dtype
    """The dtype in which the forward pass of training read the weights: FSDP's mixed precision rounds them to bf16"""


class Format(Protocol):
    as_trained: bool
    """True: ``tensors`` gets the values that training cast. Weights and gains are rounded to ``RunFacts.weight_dtype``,
    then the gains of ``RunFacts.merged_norms`` are folded in fp32; --fold-gain does the same for all other norms.
    False: gains are folded only for --fold-gain, and nothing is rounded."""
    dtype: torch.dtype
    """Of the tensors in high precision"""

    def tensors(self, fqn: str, hf_name: str, weight: torch.Tensor, permute: RowOrder) -> dict[str, torch.Tensor]:
        """Return the tensors to write for one weight: name in the safetensors file -> tensor.

        Args:
            fqn: name of the parameter in TorchTitan, "layers.0.feed_forward.w3.weight".
            hf_name: its name in Hugging Face, "model.layers.0.mlp.up_proj.weight".
            weight: fp32, rows in TorchTitan's order, gain folded where gains are folded.
            permute: to apply to the rows of the weight, or of its codes and scales. Most weights keep their order.
        """
        ...

    def values(self, fqn: str, weight: torch.Tensor) -> torch.Tensor:
        """Return what a model with this export multiplies in place of ``weight``, rows in TorchTitan's order.

        Args:
            fqn, weight: as for ``tensors``; the weights of experts may be stacked in front.
        """
        ...

    def config(self) -> dict:
        """Return entries for config.json, such as {"quantization_config": {...}}. Called after all tensors."""
        ...


class HighPrecision:
    """``hf``: every weight as one tensor, in one floating-point dtype."""

    as_trained = False
    default_dtype = torch.float32

    def __init__(self, facts: RunFacts, dtype: torch.dtype | None):
        self.dtype = self.default_dtype if dtype is None else dtype

    def tensors(self, fqn: str, hf_name: str, weight: torch.Tensor, permute: RowOrder) -> dict[str, torch.Tensor]:
        return {hf_name: permute(weight).to(self.dtype)}

    def values(self, fqn: str, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.dtype)

    def config(self) -> dict:
        return {}
