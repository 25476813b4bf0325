"""Writes a trained model as a model of transformers, in one pass over its parameters.

Each weight is read, multiplied by the gain before it where gains are folded, cast or rounded, put into Hugging Face's
order of rows and names, and handed to the writer of safetensors. The format ``hf`` has one tensor for each weight.
Other formats, those with a layout, have codes and scales for linears whose weight training cast to that format for
fprop: the codes and scales that training multiplied, as compressed-tensors 0.20 stores them, and vLLM 0.33 and
transformers 5 read them. (vLLM also reads ModelOpt's layouts, but transformers does not.)

TorchTitan and Hugging Face store the rows of Llama's wq and wk in different orders. Training cast a weight in
TorchTitan's order, so rows move after the cast: tiles of 16 x 16 elements would have other scales otherwise.

vLLM joins wq, wk and wv into one matrix, and w1 and w3 (``packed_modules_mapping`` in
vllm/model_executor/models/llama.py, release 0.33). A joined matrix has one scheme and one tensor scale; of several, it
takes the largest for all. So weights that vLLM joins get one tensor scale: their block scales shrink by a power of two,
which leaves every product of the scales, and every code, unchanged. Where E4M3 cannot hold such a block scale, or where
one of the weights trained in another format, all of them are written as values. These are the values that training
multiplied, and bf16 holds them exactly. The same goes for the output head, which vLLM reads in high precision only.
Exact tensor scales, those of four over six, do not differ by powers of two: weights that vLLM joins are then values.
Other block scales would change them by up to 6 %, bf16 rounds them by 0.4 % at most, fp32 by 2e-7.

All experts of a layer have one scheme in vLLM (``get_moe_method`` in compressed_tensors_moe.py), and w1 and w3 of each
expert one tensor scale. If those of one expert cannot, all experts of the layer are written as values.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mxtrain.data.tokenizer import FILES as TOKENIZER_FILES
from mxtrain.data.tokenizer import PLAIN_CLASSES, LoadedTokenizer, copy_tokenizer, load_tokenizer, special_tokens
from mxtrain.errors import ConfigError
from mxtrain.files import read_json
from mxtrain.formats.matrices import Codes
from mxtrain.formats.recipe import FORMATS, LinearRecipe, Recipe
from mxtrain.hugging_face.model_config import (
    CONFIG_FILE,
    GENERATION_FILE,
    ModelShape,
    Parameter,
    config_json,
    read_generation,
)
from mxtrain.hugging_face.model_files import ShardWriter

# Linears of a block that vLLM joins into one, by their names in TorchTitan and in the order of its parameters.
JOINED = (
    ("attention.wq", "attention.wk", "attention.wv"),
    ("attention.wq_a", "attention.wkv_a"),
    ("feed_forward.w1", "feed_forward.w3"),
    ("moe.shared_experts.w1", "moe.shared_experts.w3"),
    ("moe.experts.w1", "moe.experts.w2", "moe.experts.w3"),
)
SHARD_BYTES, SMALLEST_SHARD_BYTES = 5_000_000_000, 256_000_000
EMBEDDING, LAST_NORM, HEAD = "tok_embeddings", "norm", "lm_head"
# Norm of a block -> the parameters that take its result, by their names in TorchTitan. Experts stack their weights, and
# the router's gate is a linear, too. Qwen3's norms of queries and keys feed no linear.
FEEDS = {
    "attention_norm": r"attention\.(w[qkv]|wq_a|wkv_a)\.weight",
    "attention.q_norm": r"attention\.wq_b\.weight",
    "attention.kv_norm": r"attention\.wkv_b\.weight",
    "ffn_norm": r"(feed_forward|moe\.shared_experts)\.w[13]\.weight|moe\.experts\.w[13]|moe\.router\.gate\.weight",
}
GATE, BIAS = ".router.gate.weight", ".expert_bias"
"""Ends of the names of a router's parameters. The bias stays in fp32, because its steps are small beside it"""


@dataclass(frozen=True)
class Trained:
    """A checkpoint and how it was trained. Keys are names of parameters and modules in TorchTitan."""

    shape: ModelShape
    parameters: Mapping[str, Parameter]
    weights: Mapping[str, torch.Tensor]
    """The weights, each read when it is asked for"""
    recipes: Mapping[str, LinearRecipe | None]
    """
    Every linear, such as "layers.0.attention.wq", and stacked weights of experts, such as "layers.0.moe.experts.w1" ->
    the recipe; None in high precision
    """
    merged_norms: frozenset[str]
    """The norms whose gain training folded into the next weights: the MXNorms of this step"""
    weight_dtype: torch.dtype
    """The dtype in which the forward pass of training read the weights: FSDP's mixed precision rounds them to bf16"""
    tokenizer: Path
    """Folder of the tokenizer, if there is one, with the generation_config.json of a model that was imported"""
    coded_layers: frozenset[str] = frozenset()
    """The layers whose weights, and gains that are folded into these, training cast without rounding them first"""


class Exporter:
    """Writes one export.

    Args:
        model: the checkpoint.
        format: one of ``formats()``. A block format gets the weights that training cast: weights and gains are rounded
            to ``model.weight_dtype``, and the gains of ``model.merged_norms`` are folded.
        fold_gain: with "hf", fold the gains of all norms that feed only linears, and write gains of one.
        dtype: of all tensors in high precision; None takes fp32 for "hf" and bf16 for the other formats.
    """

    def __init__(self, model: Trained, format: str, fold_gain: bool = False, dtype: torch.dtype | None = None):
        self._model = model
        self._format = format
        self._block_format = None if format == "hf" else FORMATS[format]
        self._layout = self._block_format and self._block_format.layout
        self._generation = read_generation(model.tokenizer)
        self.dtype = dtype or (torch.bfloat16 if self._layout else torch.float32)
        self._recipes = self._recipes_of_format()
        if self._layout and fold_gain:
            raise ConfigError(f"--fold-gain does not fit --format = {format!r}, which folds as training did; omit it")
        norms = {fqn: norm_before(fqn) for fqn in model.parameters}
        self._norms = {fqn: norm for fqn, norm in norms.items() if norm and self._folds(norm, fold_gain)}
        self._ignored: list[str] = []
        self._values: list[str] = []  # linears that trained in the format, but cannot be stored in it

    def write(self, folder: Path) -> tuple[int, list[str]]:
        """Write safetensors, config.json, generation_config.json and the tokenizer into ``folder``.

        Returns the bytes of all tensors, and a line for the user if the tokenizer is missing.
        """
        elements = sum(math.prod(parameter.shape) for parameter in self._model.parameters.values())
        # A writer holds a file in memory: at most a quarter of a large model.
        writer = ShardWriter(folder, min(SHARD_BYTES, max(SMALLEST_SHARD_BYTES, elements * self.dtype.itemsize // 4)))
        for name, tensor in self.tensors():
            writer.add(name, tensor)
        writer.finish()
        notes, generation, tokenizer = [], self._generation, self._model.tokenizer
        if (tokenizer / TOKENIZER_FILES[0]).is_file():
            loaded = load_tokenizer(tokenizer)
            _write_tokenizer(tokenizer, folder, loaded)
            ids = {"bos_token_id": loaded.bos_id, "eos_token_id": loaded.eos_id}
            generation = {name: value for name, value in ids.items() if value is not None} | generation
        else:
            notes.append(f"the export has no tokenizer: {tokenizer / TOKENIZER_FILES[0]} is missing")
        dtype = str(self.dtype).removeprefix("torch.")
        config = config_json(self._model.shape, dtype, generation) | self.quantization()
        for name, content in {CONFIG_FILE: config, GENERATION_FILE: generation}.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return writer.total_bytes, notes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors by their names. Linears that vLLM joins come together, in the place of the last."""
        for fqn, parameter in self._model.parameters.items():
            if not parameter.names:
                continue
            if fqn not in self._recipes:
                yield from self._plain(fqn)
            else:
                joined = [member for member in joined_with(fqn) if member in self._model.parameters]
                in_format = [member for member in joined if member in self._recipes]
                if fqn == in_format[-1]:
                    yield from self._quantized(in_format, is_whole=len(in_format) == len(joined))

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
                "ignore": sorted({HEAD, *self._ignored, *self._values}),
            }
        }

    def notes(self) -> list[str]:
        """Return a line for the user about each thing that the block format cannot store, after all tensors."""
        notes, joined = [], [linear for linear in self._values if linear != HEAD]
        if joined:
            why = "vLLM joins each with others, and no format and tensor scale serves all of them"
            notes.append(f"{len(joined)} linears are values, not codes, such as {joined[0]}: {why}")
        if any(recipe.tensor_scale == "row" for recipe in self._recipes.values()):
            why = f"{self._layout.compression} has none, so readers leave inputs in high precision"
            notes.append(f"training had a scale for each row of inputs (tensor_scale = 'row'): {why}")
        return notes

    def _plain(self, fqn: str) -> Iterator[tuple[str, torch.Tensor]]:
        parameters, shape = self._model.parameters, self._model.shape
        weight, parameter = self._weight(fqn), parameters[fqn]
        weight = weight if parameter.order is None else weight[parameter.order]
        for name, part in zip(parameter.names, _matrices(weight), strict=True):
            if part.ndim == 2 and not fqn.startswith(EMBEDDING):
                self._ignored.append(name.removesuffix(".weight"))
            yield name, part.to(torch.float32 if fqn.endswith(BIAS) else self.dtype)
        if fqn.endswith(GATE) and shape.model_type == "deepseek_v3" and fqn.replace(GATE, BIAS) not in parameters:
            yield name.replace(".weight", ".e_score_correction_bias"), torch.zeros(len(weight))

    def _quantized(self, fqns: list[str], is_whole: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of linears that vLLM joins; ``is_whole``: all of these are in the format."""
        codes = [self._codes(fqn) for fqn in fqns]
        if len(self._model.parameters[fqns[0]].shape) == 3:  # of each expert, vLLM joins w1 and w3
            w1, w2, w3 = ([*own.items()] for own in codes)
            matrices = [*map(dict, zip(w1, w3, strict=True)), *(dict([own]) for own in w2)]
        else:
            matrices = [{linear: own for part in codes for linear, own in part.items()}]
        readable, ops = is_whole and HEAD not in matrices[0], self._block_format.ops
        unified = [ops.with_one_tensor_scale([*matrix.values()]) if readable else None for matrix in matrices]
        for matrix, own in zip(matrices, unified, strict=True):
            if None in unified:  # vLLM cannot read them in the block format
                self._values += matrix
                yield from ((f"{linear}.weight", ops.dequantize(part, self.dtype)) for linear, part in matrix.items())
            else:
                for linear, part in zip(matrix, own, strict=True):
                    yield from ops.stored(linear, part).items()

    def _codes(self, fqn: str) -> dict[str, Codes]:
        """Return the codes of a linear, or of each expert, by their names."""
        weight, parameter, recipe = self._weight(fqn), self._model.parameters[fqn], self._recipes[fqn]
        if not weight.isfinite().all():
            raise ConfigError(f"--format = {self._format!r}: {fqn} is not finite; choose another --step")
        return {
            name.removesuffix(".weight"): recipe.ops.encode(matrix, recipe).rows(parameter.order)
            for name, matrix in zip(parameter.names, _matrices(weight), strict=True)
        }

    def _weight(self, fqn: str) -> torch.Tensor:
        """Return a parameter in fp32, with the gain before it folded, or ones for a gain that is folded.

        W diag(gamma) after a norm with gains of one is W after a norm with gain gamma: a norm multiplies column j of
        its result by gamma_j, and a linear sums over these columns.
        """
        if fqn.removesuffix(".weight") in self._norms.values():
            return torch.ones(self._model.parameters[fqn].shape)
        weight = self._read(fqn).float()
        return weight * self._read(f"{self._norms[fqn]}.weight", fqn).float() if fqn in self._norms else weight

    def _read(self, fqn: str, folded_into: str | None = None) -> torch.Tensor:
        weight, layer = self._model.weights[fqn], (folded_into or fqn).rpartition(".")[0]
        is_rounded = self._layout and not fqn.endswith(BIAS) and layer not in self._model.coded_layers
        return weight.to(self._model.weight_dtype) if is_rounded else weight

    def _folds(self, norm: str, fold_gain: bool) -> bool:
        if self._layout is None:
            return fold_gain and norm != LAST_NORM
        # The weight of a tied head is the embedding's, too, and cannot hold a gain.
        is_tied_head = norm == LAST_NORM and self._model.shape.tie_word_embeddings
        return norm in self._model.merged_norms and not is_tied_head

    def _recipes_of_format(self) -> dict[str, Recipe]:
        """Return the fprop recipes of the weights that training cast to this format, by the parameters' names."""
        if self._layout is None:
            return {}
        model = self._model
        names = {fqn: fqn if fqn in model.parameters else f"{fqn}.weight" for fqn in model.recipes}
        fprop = {names[fqn]: recipe and recipe.fprop for fqn, recipe in model.recipes.items()}
        formats = {fqn: recipe.format if recipe else None for fqn, recipe in fprop.items()}
        found = {fqn: fprop[fqn] for fqn, format in formats.items() if format == self._block_format}
        if not found:
            names = sorted(format.name for format in {*formats.values()} if format is not None)
            has = [*names, "high-precision"] if None in formats.values() else names
            raise ConfigError(
                f"--format = {self._format!r}: fprop casts no weight to this format at this step; the linears "
                f"have {' or '.join(has)} weights; choose one of these formats, or 'hf', which takes every run"
            )
        return found


def formats() -> tuple[str, ...]:
    """The formats that an export can have."""
    return ("hf", *(name for name, fmt in FORMATS.items() if fmt.layout))


def _write_tokenizer(source: Path, folder: Path, loaded: LoadedTokenizer) -> None:
    """Copy a tokenizer, and name the class that reads tokenizer.json alone: others replace parts of it."""
    copy_tokenizer(source, folder)
    file = folder / TOKENIZER_FILES[1]
    config = special_tokens(source, str(source)) | (read_json(file) if file.is_file() else {})
    config["tokenizer_class"] = PLAIN_CLASSES[0]
    config.pop("auto_map", None)
    if hasattr(loaded.encoder.pre_tokenizer, "add_prefix_space"):  # transformers 4 would overwrite it
        config["add_prefix_space"] = loaded.encoder.pre_tokenizer.add_prefix_space
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _matrices(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """The weight itself, or those of the experts in [E, N, D]."""
    return weight.unbind() if weight.ndim == 3 else [weight]


def joined_with(fqn: str) -> list[str]:
    """Return the weights that vLLM joins with this one, itself included."""
    found = re.fullmatch(r"(layers\.\d+)\.(.+?)(\.weight)?", fqn)
    joined = next((names for names in JOINED if found and found[2] in names), None)
    return [fqn] if joined is None else [f"{found[1]}.{name}{found[3] or ''}" for name in joined]


def norm_before(fqn: str) -> str | None:
    """Return the norm whose gain can be folded into this parameter: "layers.0.attention_norm"; None if none can."""
    if fqn == "output.weight":
        return LAST_NORM
    for norm, fed in FEEDS.items():
        if found := re.fullmatch(rf"(layers\.\d+)\.({fed})", fqn):
            return f"{found[1]}.{norm}"
    return None
