"""The formats ``mxfp8`` and ``nvfp4`` of an export: linears as the codes and scales that training multiplied.

``mxtrain.hugging_face.block_layouts`` says how they are stored. This file decides which linears are.

vLLM joins wq, wk and wv into one matrix, and w1 and w3 (``packed_modules_mapping`` in
vllm/model_executor/models/llama.py, release 0.33). A joined matrix has one scheme and one tensor scale; of several, it
takes the largest for all. So weights that vLLM joins get one tensor scale: their block scales shrink by a power of two,
which leaves every product of the scales, and every code, unchanged. Where E4M3 cannot hold such a block scale, or where
one of the weights trained in another format, all of them are written as values. These are the values that training
multiplied, and bf16 holds them exactly. The same goes for the output head, which vLLM reads in high precision only.
"""

import torch

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.block_layouts import Codes, Layout
from mxtrain.hugging_face.formats import RowOrder, RunFacts
from mxtrain.recipes.recipe import Recipe

# The last names of the linears that vLLM joins into one.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EMBEDDING, HEAD = "embed_tokens", "lm_head"


class Quantized:
    """A format of an export (``mxtrain.hugging_face.formats.Format``): linears in a block format, all else as it is.

    A linear is written in the block format if training cast its weight to that format for fprop. Its weight is cast
    as training did, from ``RunFacts.weight_dtype`` and with the gain of its MXNorm, if it has one. All other tensors
    are rounded to ``dtype``.

    Args:
        layout: ``MXFP8_LAYOUT`` or ``NVFP4_LAYOUT``.
        facts: the run.
        dtype: of all tensors in high precision.

    Raises:
        ConfigError: training cast no weight to this format.
    """

    as_trained = True
    default_dtype = torch.bfloat16

    def __init__(self, layout: Layout, facts: RunFacts, dtype: torch.dtype | None):
        self._layout = layout
        self.dtype = self.default_dtype if dtype is None else dtype
        self._recipes = {
            fqn: recipe.fprop
            for fqn, recipe in facts.recipes.items()
            if recipe is not None and recipe.fprop.format == layout.block_format
        }
        if not self._recipes:
            raise ConfigError(
                f"--format = {layout.name!r}: fprop casts no weight of this run to {layout.name} at this step; its "
                f"linears have {_formats_of(facts)} weights: choose another format; 'hf' takes every run"
            )
        self._joined = _joined(facts, self._recipes)
        self._held: dict[tuple[str, ...], dict[str, Codes]] = {}
        self._ignored: list[str] = []

    def tensors(self, fqn: str, hf_name: str, weight: torch.Tensor, permute: RowOrder) -> dict[str, torch.Tensor]:
        """See ``Format.tensors``. Weights that vLLM joins come together, with the last of them.

        Raises:
            ConfigError: a weight is not finite.
        """
        linear, hf_linear = fqn.removesuffix(".weight"), hf_name.removesuffix(".weight")
        if linear not in self._recipes:
            if weight.ndim == 2 and not hf_linear.endswith(EMBEDDING):
                self._ignored.append(hf_linear)
            return {hf_name: permute(weight).to(self.dtype)}
        if not weight.isfinite().all():
            raise ConfigError(f"--format = {self._layout.name!r}: {fqn} has values that are not finite")
        codes = self._layout.cast(weight, self._recipes[linear], permute)
        joined = self._joined[hf_linear]
        if joined is None:
            return self._plain({hf_linear: codes})
        held = self._held.setdefault(joined, {})
        held[hf_linear] = codes
        if len(held) < len(joined):
            return {}
        return self._together(self._held.pop(joined))

    def values(self, fqn: str, weight: torch.Tensor) -> torch.Tensor:
        recipe = self._recipes.get(fqn.removesuffix(".weight"))
        if recipe is None:
            return weight.to(self.dtype)
        return self._layout.values(self._layout.cast(weight, recipe, lambda rows: rows), torch.float32)

    def config(self) -> dict:
        layout = self._layout
        group = {
            "targets": ["Linear"],
            "weights": layout.weights,
            "input_activations": layout.activations,
            "output_activations": None,
            "format": layout.compression,
        }
        return {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "quantization_status": "compressed",
                "format": layout.compression,
                "config_groups": {"group_0": group},
                # A head is never in the block format. Readers look for one that is the embedding under its own name.
                "ignore": sorted({HEAD, *self._ignored}),
            }
        }

    def _together(self, joined: dict[str, Codes]) -> dict[str, torch.Tensor]:
        unified = self._layout.unify(list(joined.values()))
        if unified is None:
            return self._plain(joined)
        tensors = {}
        for linear, codes in zip(joined, unified):
            tensors |= self._layout.tensors(linear, codes)
        return tensors

    def _plain(self, linears: dict[str, Codes]) -> dict[str, torch.Tensor]:
        """Write the values of codes, for linears that vLLM cannot read in the block format."""
        self._ignored.extend(linears)
        return {f"{linear}.weight": self._layout.values(codes, self.dtype) for linear, codes in linears.items()}


def _joined(facts: RunFacts, recipes: dict[str, Recipe]) -> dict[str, tuple[str, ...] | None]:
    """Return, by the name of each linear in ``recipes``, the linears that vLLM joins it with, itself included.

    Names are those of Hugging Face. None stands for linears that vLLM cannot read in a block format: the head, and
    linears of which only a part is in ``recipes``.
    """
    existing = {name.removesuffix(".weight") for names in facts.names.values() for name in names}
    quantized = {facts.names[f"{linear}.weight"][0].removesuffix(".weight") for linear in recipes}
    joined = {}
    for linear in quantized:
        parent, _, own = linear.rpartition(".")
        ends = next((ends for ends in JOINED if own in ends), (own,))
        members = tuple(name for end in ends if (name := f"{parent}.{end}") in existing)
        joined[linear] = members if own != HEAD and quantized.issuperset(members) else None
    return joined


def _formats_of(facts: RunFacts) -> str:
    """Return the formats of the weights in words: "mxfp8 or high-precision"."""
    formats = [recipe.fprop.format for recipe in facts.recipes.values() if recipe is not None]
    names = sorted({block_format.name for block_format in formats if block_format is not None})
    if len(formats) < len(facts.recipes) or None in formats:
        names.append("high-precision")
    return " or ".join(names)
