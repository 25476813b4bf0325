"""Writes a trained model as a model of transformers, in one pass over its parameters.

Each weight is read, multiplied by the gain before it where gains are folded, cast or rounded, put into Hugging Face's
order of rows and names, and handed to the writer of safetensors. The format ``hf`` has one tensor for each weight.
``mxfp8`` and ``nvfp4`` have codes and scales for linears whose weight training cast to that format for fprop.

TorchTitan and Hugging Face store the rows of Llama's wq and wk in different orders. Training cast a weight in
TorchTitan's order, so rows move after the cast: tiles of 16 x 16 elements would have other scales otherwise.

vLLM joins wq, wk and wv into one matrix, and w1 and w3 (``packed_modules_mapping`` in
vllm/model_executor/models/llama.py, release 0.33). A joined matrix has one scheme and one tensor scale; of several, it
takes the largest for all. So weights that vLLM joins get one tensor scale: their block scales shrink by a power of two,
which leaves every product of the scales, and every code, unchanged. Where E4M3 cannot hold such a block scale, or where
one of the weights trained in another format, all of them are written as values. These are the values that training
multiplied, and bf16 holds them exactly. The same goes for the output head, which vLLM reads in high precision only.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mxtrain.data.tokenizer import FILES as TOKENIZER_FILES
from mxtrain.data.tokenizer import copy_tokenizer, load_tokenizer
from mxtrain.errors import ConfigError
from mxtrain.hugging_face.block_layouts import LAYOUTS, Codes
from mxtrain.hugging_face.model_config import CONFIG_FILE, GENERATION_FILE, ModelShape, config_json, read_generation
from mxtrain.hugging_face.model_files import ShardWriter, shard_size
from mxtrain.recipes.recipe import LinearRecipe

FORMATS = ("hf", *LAYOUTS)
# The last names of the linears that vLLM joins into one.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EMBEDDING, HEAD = "embed_tokens", "lm_head"
LAST_NORM = "norm"
# Norm of a block -> the parameters that take its result, by their names in TorchTitan. Experts stack their weights, and
# the router's gate is a linear, too. Qwen3's norms of queries and keys feed no linear.
FEEDS = {
    "attention_norm": r"attention\.w[qkv]\.weight",
    "ffn_norm": r"feed_forward\.w[13]\.weight|moe\.experts\.w[13]|moe\.router\.gate\.weight",
}


@dataclass(frozen=True)
class Parameter:
    """A parameter's place in Hugging Face's model."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    """One; one for each expert; or none for a parameter that Hugging Face does not have"""
    order: torch.Tensor | None
    """int64 [N], the rows in Hugging Face's order; None if they keep their order"""


@dataclass(frozen=True)
class Trained:
    """A checkpoint and how it was trained. Keys are names of parameters and modules in TorchTitan."""

    shape: ModelShape
    parameters: Mapping[str, Parameter]
    weights: Mapping[str, torch.Tensor]
    """The weights, each read when it is asked for"""
    recipes: Mapping[str, LinearRecipe | None]
    """Every linear, such as "layers.0.attention.wq" -> its recipe; None in high precision"""
    merged_norms: frozenset[str]
    """The norms whose gain training folded into the next weights: the MXNorms of this step"""
    weight_dtype: torch.dtype
    """The dtype in which the forward pass of training read the weights: FSDP's mixed precision rounds them to bf16"""
    tokenizer: Path
    """Folder of the tokenizer, if there is one, with the generation_config.json of a model that was imported"""


class Exporter:
    """Writes one export.

    Args:
        model: the checkpoint.
        format: one of FORMATS. A block format gets the weights that training cast: weights and gains are rounded to
            ``model.weight_dtype``, and the gains of ``model.merged_norms`` are folded.
        fold_gain: with "hf", fold the gains of all norms that feed only linears, and write gains of one.
        dtype: of all tensors in high precision; None takes fp32 for "hf" and bf16 for the other formats.

    Raises:
        ConfigError: a format to which training cast no weight, ``fold_gain`` with a block format, or a damaged
            generation_config.json.
    """

    def __init__(self, model: Trained, format: str, fold_gain: bool = False, dtype: torch.dtype | None = None):
        self._model = model
        self._format = format
        self._layout = None if format == "hf" else LAYOUTS[format]
        self._generation = read_generation(model.tokenizer)
        self.dtype = dtype or (torch.bfloat16 if self._layout else torch.float32)
        self._recipes = self._recipes_of_format()
        if self._layout and fold_gain:
            raise ConfigError(
                f"--fold-gain does not go with --format = {format!r}, which folds the gains that training folded and "
                "leaves the others: leave it out"
            )
        norms = {fqn: norm_before(fqn) for fqn in model.parameters}
        self._norms = {fqn: norm for fqn, norm in norms.items() if norm and self._folds(norm, fold_gain)}
        self._joined = self._joined_linears()
        self._held: dict[tuple[str, ...], dict[str, Codes]] = {}
        self._ignored: list[str] = []

    def values(self, fqn: str) -> torch.Tensor:
        """Return what the exported model multiplies in place of a parameter, rows in TorchTitan's order."""
        weight, recipe = self._weight(fqn), self._recipes.get(fqn.removesuffix(".weight"))
        if recipe is None:
            return weight.to(self.dtype)
        return self._layout.values(self._layout.cast(weight, recipe), torch.float32)

    def write(self, folder: Path) -> tuple[list[str], int, list[str]]:
        """Write safetensors, config.json, generation_config.json and the tokenizer into ``folder``.

        Returns:
            The names of the files without the tokenizer's; the bytes of all tensors; and a line for the user if the
            tokenizer is missing.

        Raises:
            ConfigError: a weight to be cast is not finite, or a file of the tokenizer is damaged.
            OSError: a file cannot be written.
        """
        elements = sum(math.prod(parameter.shape) for parameter in self._model.parameters.values())
        writer = ShardWriter(folder, shard_size(elements * self.dtype.itemsize))
        for fqn in self._model.parameters:
            for name, tensor in self.tensors(fqn).items():
                writer.add(name, tensor)
        files = writer.finish()
        notes, generation, tokenizer = [], self._generation, self._model.tokenizer
        if (tokenizer / TOKENIZER_FILES[0]).is_file():
            loaded = load_tokenizer(tokenizer)
            copy_tokenizer(tokenizer, folder)
            ids = {"bos_token_id": loaded.bos_id, "eos_token_id": loaded.eos_id}
            generation = {name: value for name, value in ids.items() if value is not None} | generation
        else:
            notes.append(f"the export has no tokenizer: {tokenizer / TOKENIZER_FILES[0]} is missing")
        dtype = str(self.dtype).removeprefix("torch.")
        config = config_json(self._model.shape, dtype, generation) | self.quantization()
        for name, content in {CONFIG_FILE: config, GENERATION_FILE: generation}.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return [*files, CONFIG_FILE, GENERATION_FILE], writer.total_bytes, notes

    def tensors(self, fqn: str) -> dict[str, torch.Tensor]:
        """Return the tensors to write for a parameter. Weights that vLLM joins come together, with the last of them."""
        parameter, linear = self._model.parameters[fqn], fqn.removesuffix(".weight")
        if not parameter.names:
            return {}
        weight = self._weight(fqn)
        if linear in self._recipes:
            if not weight.isfinite().all():
                raise ConfigError(f"--format = {self._format!r}: {fqn} has values that are not finite")
            codes = self._layout.cast(weight, self._recipes[linear]).rows(parameter.order)
            return self._quantized(parameter.names[0].removesuffix(".weight"), codes)
        weight = weight if parameter.order is None else weight[parameter.order]
        parts = weight.unbind() if weight.ndim == 3 else [weight]  # experts are stacked
        if parts[0].ndim == 2:
            linears = [name.removesuffix(".weight") for name in parameter.names]
            self._ignored += [name for name in linears if not name.endswith(EMBEDDING)]
        return {name: part.to(self.dtype) for name, part in zip(parameter.names, parts, strict=True)}

    def quantization(self) -> dict:
        """Return the entries of config.json for a block format, after all tensors."""
        if self._layout is None:
            return {}
        group = {
            "targets": ["Linear"],
            "weights": self._layout.weights,
            "input_activations": self._layout.activations,
            "output_activations": None,
            "format": self._layout.compression,
        }
        return {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "quantization_status": "compressed",
                "format": self._layout.compression,
                "config_groups": {"group_0": group},
                # A head is never in the block format. Readers look for a tied head under its own name.
                "ignore": sorted({HEAD, *self._ignored}),
            }
        }

    def _weight(self, fqn: str) -> torch.Tensor:
        """Return a parameter in fp32, with the gain before it folded, or ones for a gain that is folded.

        W diag(gamma) after a norm with gains of one is W after a norm with gain gamma: a norm multiplies column j of
        its result by gamma_j, and a linear sums over these columns.
        """
        if fqn.removesuffix(".weight") in self._norms.values():
            return torch.ones(self._model.parameters[fqn].shape)
        weight = self._read(fqn).float()
        return weight * self._read(f"{self._norms[fqn]}.weight").float() if fqn in self._norms else weight

    def _read(self, fqn: str) -> torch.Tensor:
        weight = self._model.weights[fqn]
        return weight.to(self._model.weight_dtype) if self._layout else weight

    def _folds(self, norm: str, fold_gain: bool) -> bool:
        if self._layout is None:
            return fold_gain and norm != LAST_NORM
        # The weight of a tied head is the embedding's, too, and cannot hold a gain.
        is_tied_head = norm == LAST_NORM and self._model.shape.tie_word_embeddings
        return norm in self._model.merged_norms and not is_tied_head

    def _recipes_of_format(self) -> dict[str, object]:
        """Return the fprop recipes of the linears whose weight training cast to this format, by their names."""
        if self._layout is None:
            return {}
        fprop = {fqn: recipe.fprop for fqn, recipe in self._model.recipes.items() if recipe is not None}
        found = {fqn: recipe for fqn, recipe in fprop.items() if recipe.format == self._layout.block_format}
        if not found:
            names = sorted({recipe.format.name for recipe in fprop.values() if recipe.format is not None})
            if len(fprop) < len(self._model.recipes) or any(recipe.format is None for recipe in fprop.values()):
                names.append("high-precision")
            raise ConfigError(
                f"--format = {self._format!r}: fprop casts no weight of this run to {self._format} at this step; its "
                f"linears have {' or '.join(names)} weights: choose another format; 'hf' takes every run"
            )
        return found

    def _joined_linears(self) -> dict[str, tuple[str, ...] | None]:
        """Return, by Hugging Face's name of each linear in the format, the linears that vLLM joins, itself included.

        None stands for linears that vLLM cannot read in a block format: the head, and linears of which only a part is
        in the format.
        """
        names = {fqn: parameter.names for fqn, parameter in self._model.parameters.items()}
        existing = {name.removesuffix(".weight") for each in names.values() for name in each}
        quantized = {names[f"{linear}.weight"][0].removesuffix(".weight") for linear in self._recipes}
        joined = {}
        for linear in quantized:
            parent, _, own = linear.rpartition(".")
            ends = next((ends for ends in JOINED if own in ends), (own,))
            members = tuple(name for end in ends if (name := f"{parent}.{end}") in existing)
            joined[linear] = members if own != HEAD and quantized.issuperset(members) else None
        return joined

    def _quantized(self, linear: str, codes: Codes) -> dict[str, torch.Tensor]:
        members = self._joined[linear]
        if members is None:
            return self._as_values({linear: codes})
        held = self._held.setdefault(members, {})
        held[linear] = codes
        if len(held) < len(members):
            return {}
        del self._held[members]
        unified = self._layout.unify(list(held.values()))
        if unified is None:
            return self._as_values(held)
        return {
            name: tensor
            for linear, codes in zip(held, unified, strict=True)
            for name, tensor in self._layout.tensors(linear, codes).items()
        }

    def _as_values(self, linears: dict[str, Codes]) -> dict[str, torch.Tensor]:
        """Write the values of codes, for linears that vLLM cannot read in the block format."""
        self._ignored += linears
        return {f"{linear}.weight": self._layout.values(codes, self.dtype) for linear, codes in linears.items()}


def norm_before(fqn: str) -> str | None:
    """Return the norm whose gain can be folded into this parameter: "layers.0.attention_norm"; None if none can."""
    if fqn == "output.weight":
        return LAST_NORM
    for norm, fed in FEEDS.items():
        if found := re.fullmatch(rf"(layers\.\d+)\.({fed})", fqn):
            return f"{found[1]}.{norm}"
    return None
