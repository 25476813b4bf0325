"""FSDP2 gathers weights as codes: 1 + 1/1024 bytes of a weight instead of 2, and every process casts its own rows.

With weights in square tiles, fprop and dgrad read one code of a weight (``LinearRecipe.has_one_code``). The byte of a
tile depends on max |W gamma|, so a process needs the whole gain before it casts. Of a weight W [N, D] over P processes:

    before the gather   codes and scales of W[own rows] diag(gamma), cast from the shard's own dtype
    after the gather    their values [N, D], in FSDP's dtype, which holds them exactly: the parameter of the forward
    backward            G = dL/d(W diag(gamma)), which FSDP sums and scatters
    after the backward  dW = G diag(gamma) on each shard; dgamma_j = sum_n W_nj G_nj, summed over the shards

Operands have the bits of one process, which folds and casts fp32 weights, too. In high precision, FSDP rounds weights
and gain to its dtype first. Values take the memory of a gathered weight; codes are freed once they are decoded. In mode
"native", layers cast the values again, which changes none.

FSDP2's extension is a subclass of the shard, as in torchao's ``float8/fsdp_utils.py``. Here the subclass is no wrapper:
all operations give plain tensors, so checkpoints and optimizers see none of it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from mxtrain.errors import ConfigError
from mxtrain.formats.collectives import gather_parts, sum_parts
from mxtrain.formats.matrices import CastSpec
from mxtrain.launch.pytorch import replace_local, without_torch_function
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLayer, QuantizedLinear
from mxtrain.norms.mxnorm import fold_backward


class _Shard(torch.Tensor):
    """The local tensor of a sharded weight, with FSDP2's extension. All operations give plain tensors."""

    __torch_function__ = without_torch_function
    weight: "_Weight"

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return self.weight.encoded(self), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return self.weight.decoded(*all_gather_outputs, param_dtype)


class _Weight:
    """A weight [N, D], or of stacked experts [E, N, D], that FSDP gathers as codes.

    Attributes:
        sharded: the DTensor that the optimizer has.
        norm: the MXNorm whose gain is folded into the weight; None without.
        norm_weight: the norm's weight [D], whole and in fp32.
        values: the parameter of the forward, as FSDP first gathered it; None before.
        groups: names of the process groups that together hold the weight's rows.
    """

    norm_weight: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def __init__(self, layer: QuantizedLayer, sharded: DTensor, norm: MXNorm | None):
        self.layer, self.sharded, self.norm = layer, sharded, norm
        mesh = sharded.device_mesh
        self.groups = tuple(mesh.get_group(dim).group_name for dim in _dims_of_rows(sharded))

    @property
    def gain(self) -> torch.Tensor | None:
        return None if self.norm is None or self.norm.is_plain else self.norm.gain_of(self.norm_weight)

    def encoded(self, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of codes [n, ...] and of scales [n / 32, D / 32] of this process's rows [n, D]."""
        recipe, mode = self.layer.recipe.fprop, self.layer.gemms(shard.device).mode
        spec = CastSpec("weight", column_factor=self.gain, as_codes=True)
        codes = recipe.ops.cast([shard.view(-1, shard.shape[-1])], recipe, mode, (1,), spec)[1]
        data, scales = (part.view(torch.uint8) for part in codes[:2])
        return data, scales[:: recipe.block_size].contiguous()

    def decoded(self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype):
        """Write the values of all rows [N, D] to where the parameter of the forward has them.

        The first time, return what FSDP makes that parameter of, and the tensors whose memory FSDP frees with it.
        """
        recipe, is_first = self.layer.recipe.fprop, self.values is None
        if is_first:
            shape = scales.shape[0] * recipe.block_size, scales.shape[1] * recipe.block_size
            self.values = torch.empty(shape, dtype=dtype, device=data.device)
        # Autograd has saved this tensor. To it, writes to ``data`` are none.
        recipe.ops.decode_tiles(data, scales, self.values.data, self.layer.gemms(data.device).mode)
        data.untyped_storage().resize_(0)  # FSDP allocates it anew for the next gather
        return (self.values, (self.values,)) if is_first else None

    @torch.no_grad()
    def unfold(self) -> torch.Tensor | None:
        """Turn the shard's gradient G into dW, and return this shard's part of the gain's gradient, fp32 [D]."""
        gain, grad = self.gain, self.sharded.grad
        if gain is None or grad is None:
            return None
        g, w = (t.to_local().view(-1, t.shape[-1]) for t in (grad, self.sharded))
        dw, dgain = fold_backward(g, w, gain, self.layer.gemms(w.device).mode)
        g.copy_(dw)
        return dgain


class CodeGather:
    """Lets FSDP gather the weights of a model's linears and experts as codes.

    Weights that have none, or whose shards are not whole tiles, stay in high precision; ``kept`` counts the reasons.

    Args:
        parts: the model, or its stages on this process, after ``fully_shard``.
        shards: number of FSDP's shards of a weight.
        expert_shards: the same for the weights of experts.
    """

    def __init__(self, parts: Sequence[nn.Module], shards: int, expert_shards: int):
        self.weights: list[_Weight] = []
        self.kept: Counter[str] = Counter()
        modules = dict.fromkeys(module for part in parts for module in part.modules())
        uses = Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))
        for layer in modules:
            if isinstance(layer, QuantizedLayer):
                found = list(_weights_of(layer))
                number = expert_shards if isinstance(layer, QuantizedExperts) else shards
                reasons = [_why_not(layer, weight, norm, number, uses) for weight, norm in found]
                if reason := next(filter(None, reasons), None):
                    self.kept[reason] += len(found)
                else:
                    layer.gathers_codes = True
                    self.weights += [_Weight(layer, weight, norm) for weight, norm in found]
        if not self.weights:
            reason = max(self.kept, key=self.kept.get, default="no layer is quantized")
            raise ConfigError(
                f"mxnorm.fsdp_gather = 'quantized' finds no weight with codes: {reason}; set it to 'auto'"
            )
        self._gains = _Gains(dict.fromkeys(w.norm for w in self.weights if w.norm is not None))
        for part in parts:
            # In front of FSDP's own hook, which gathers.
            part.register_forward_pre_hook(self._before_forward, prepend=True)
            self._check_first_forward(part)

    def __str__(self) -> str:
        kept = "".join(f"; {count} in high precision: {reason}" for reason, count in self.kept.items())
        return f"FSDP gathers {len(self.weights)} weights as codes{kept}"

    def _before_forward(self, *_) -> None:
        # Fused optimizers leave no trace of a write, so the few gains are gathered for every forward.
        gains = self._gains.gather()
        for weight in self.weights:
            weight.norm_weight = gains.get(weight.norm)
            replace_local(weight.sharded, _Shard).weight = weight  # again if something has put a plain tensor there

    def _check_first_forward(self, part: nn.Module) -> None:
        layers = set(part.modules())

        def check(*_) -> None:
            hook.remove()
            if any(weight.layer in layers and weight.values is None for weight in self.weights):
                raise ConfigError(
                    f"mxnorm.fsdp_gather = 'quantized': FSDP of PyTorch {torch.__version__} gathers no codes, because "
                    "it does not call fsdp_pre_all_gather and fsdp_post_all_gather; set it to 'auto'"
                )

        hook = part.register_forward_hook(check)

    def finish_gradients(self) -> None:
        """Turn gradients of folded weights into those of weights and gains. Call it once, after a step's backwards."""
        by_groups: dict[tuple[str, ...], dict[MXNorm, torch.Tensor]] = {}
        for weight in self.weights:
            dgain = weight.unfold()
            if dgain is not None and weight.norm.weight.requires_grad:
                parts = by_groups.setdefault(weight.groups, {})
                parts[weight.norm] = dgain + parts[weight.norm] if weight.norm in parts else dgain
        for groups, parts in by_groups.items():
            self._gains.add_gradients(parts, groups)


class _Gains:
    """The weights of norms, each sharded over the same processes, P: as FSDP does it, in chunks of ceil(D / P)."""

    def __init__(self, norms: Iterable[MXNorm]):
        # Between a forward and its backward, the modules may have the gathered weights instead.
        self._weights: dict[MXNorm, DTensor] = {norm: norm.weight for norm in norms}
        if self._weights:
            weight = next(iter(self._weights.values()))
            dim = _dim_of_shards(weight)
            self._group = weight.device_mesh.get_group(dim).group_name
            self._processes, self._rank = weight.device_mesh.size(dim), weight.device_mesh.get_local_rank(dim)
            self._chunks = {norm: math.ceil(w.numel() / self._processes) for norm, w in self._weights.items()}

    @torch.no_grad()
    def gather(self) -> dict[MXNorm, torch.Tensor]:
        """Return the whole weight of every norm, fp32 [D], by one collective."""
        if not self._weights:
            return {}
        chunks = list(self._chunks.values())
        own = (weight.to_local().float() for weight in self._weights.values())
        padded = [x if x.numel() == chunk else F.pad(x, (0, chunk - x.numel())) for x, chunk in zip(own, chunks)]
        (whole,) = gather_parts([torch.cat(padded)], self._group, self._processes)
        items = zip(self._weights.items(), whole.split(chunks, 1))
        return {norm: part.reshape(-1)[: weight.numel()] for (norm, weight), part in items}

    @torch.no_grad()
    def add_gradients(self, parts: dict[MXNorm, torch.Tensor], groups: Iterable[str]) -> None:
        """Add the sums over ``groups`` of all processes' parts, fp32 [D], to the gradients of the norms' weights."""
        sums = torch.cat(list(parts.values()))
        for group in groups:
            sums = sum_parts(sums, group)
        for norm, total in zip(parts, sums.split([part.numel() for part in parts.values()])):
            weight = self._weights[norm]
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            own, first = weight.grad.to_local(), self._rank * self._chunks[norm]
            own += total[first : first + own.numel()]


def _weights_of(layer: QuantizedLayer) -> Iterator[tuple[torch.Tensor, MXNorm | None]]:
    """Yield each weight of a layer with the norm whose gain is folded into it, if any."""
    norm = next((norm for norm in layer.fed_by or () if norm.weight is not None), None)
    if isinstance(layer, QuantizedLinear):
        yield layer.weight, norm
    else:
        w1, w2, w3 = layer.weights
        yield from ((w1, norm), (w2, None), (w3, norm))


def gathered_bytes(
    model: nn.Module, weights: dict[str, nn.Parameter], itemsize: int, shards: int, layout
) -> list[list[float]]:
    """Return two lists of bytes per process, [forward, backward, fp32 gradients]: in high precision, and with codes.

    With a pipeline, they are the mean over the stages.

    Args:
        weights: the model's parameters, not split yet, by their names in TorchTitan 0.2.2.
        itemsize: bytes of an element in high precision.
        shards: number of FSDP's shards; 0 if unknown. ``layout`` has the settings ``parallelism``.
    """
    tensor, expert, stages = (getattr(layout, f"{k}_parallel_degree") for k in ("tensor", "expert", "pipeline"))
    layers = [m for m in model.modules() if isinstance(m, QuantizedLayer) and m.fed_by is not None]
    coded = {weight: layer for layer in layers if not _why_no_code(layer) for weight, _ in _weights_of(layer)}
    found = torch.zeros(2, 3, dtype=torch.float64)
    for name, weight in weights.items():
        is_expert, is_whole = weight.ndim == 3, weight.ndim == 1 or name.endswith(("gate.weight", "_a.weight"))
        split = 1 if is_whole else expert if is_expert and expert > 1 else tensor
        parts = shards * tensor // split if is_expert else shards
        of_rows = expert if is_expert else 1 if name.endswith(("wo.weight", "w2.weight")) else split
        of_code, layer = itemsize, coded.get(weight)
        if layer and weight.shape[0] % _granule(layer, weight, max(1, parts) * of_rows) == 0:
            of_code = layer.recipe.fprop.format.element_bits / 8 + layer.recipe.fprop.block_size**-2
        # By default, TorchTitan keeps what the backward needs first, and a pipeline's stages keep all.
        is_kept = stages > 1 or name.startswith(("norm.", "output."))
        again = {"always": 1, "never": 0}.get(layout.fsdp_reshard_after_forward, not is_kept)
        if parts != 1:
            sizes = torch.tensor([[size, size * again, 4] for size in (itemsize, of_code)])
            found += weight.numel() / (split * stages) * sizes.double()
    return found.tolist()


def _granule(layer: QuantizedLayer, weight: torch.Tensor, shards: int) -> int:
    """Return what the rows of a weight, or its experts, must be a multiple of."""
    return shards * (layer.recipe.fprop.block_size if weight.ndim == 2 else 1)


def _why_no_code(layer: QuantizedLayer) -> str | None:
    """Return why a layer's weights have no codes of one format that fprop and dgrad share; None if they have."""
    states = [layer.layer_state] if layer.timeline is None else layer.timeline.all_states
    has_one = all(state.recipe.has_one_code and not state.is_plain for state in states)
    is_one = has_one and len({state.recipe.fprop.format for state in states}) == 1
    return None if is_one else "fprop and dgrad do not share a code in all steps (recipe, schedule)"


def _why_not(layer: QuantizedLayer, weight: torch.Tensor, norm: MXNorm | None, shards: int, uses: dict) -> str | None:
    """Return why FSDP cannot gather a weight of this layer as codes; None if it can. The same on all processes.

    ``uses`` counts the modules that have a parameter, by its id.
    """
    if reason := _why_no_code(layer):
        return reason
    if isinstance(layer, QuantizedLinear) and layer.fed_by is None:
        return "their norm is unknown"
    own = (weight,) if norm is None else (weight, norm.weight)
    if shards < 2 or not all(isinstance(parameter, DTensor) for parameter in own):
        return "FSDP does not shard them"
    if uses[id(weight)] != 1 or not weight.requires_grad:
        return "they are tied, computed or frozen"
    if _dim_of_shards(weight) not in (rows := _dims_of_rows(weight)):
        return "FSDP shards another dimension than rows"
    parts = math.prod(weight.device_mesh.size(dim) for dim in rows)
    if weight.shape[0] % _granule(layer, weight, parts):
        return f"{weight.shape[0]} rows or experts over {parts} processes are not whole tiles"
    return None


def _dims_of_rows(tensor: DTensor) -> list[int]:
    """Return the dimensions of the mesh over which rows are split."""
    return [i for i, placement in enumerate(tensor.placements) if getattr(placement, "dim", None) == 0]


def _dim_of_shards(tensor: DTensor) -> int | None:
    """Return the dimension of the mesh over which FSDP shards: the first with shards. Replicas come before it."""
    return next((i for i, placement in enumerate(tensor.placements) if hasattr(placement, "dim")), None)
