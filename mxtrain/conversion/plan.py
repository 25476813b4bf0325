"""What every module of a model becomes, or why it stays: a value that can be printed and tested without a model."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch.nn as nn

from mxtrain.conversion.layers import MixtureFacts, NormFacts
from mxtrain.conversion.survey import WeightFacts
from mxtrain.formats.recipe import LinearRecipe
from mxtrain.nn.decompose_k.router import DecomposeKRouter
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.gated_norm import GatedMXNorm
from mxtrain.nn.mixture import MXNormRouter
from mxtrain.nn.mx_linear import MXLinear
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLayer
from mxtrain.norms import FUSED_NORMS
from mxtrain.norms.row_norm import FusedNorm


@dataclass(frozen=True)
class WeightUse:
    """What a conversion makes of a weight.

    Attributes:
        multiplications: per token of a forward pass.
        quantized: share of its GEMMs (fprop, dgrad, wgrad) that a conversion quantizes, 0 to 1.
        note: as in ``WeightFacts``.
    """

    multiplications: float
    quantized: float
    note: str


def weight_uses(weights: Mapping[str, WeightFacts], recipes: Mapping[str, LinearRecipe]) -> dict[str, WeightUse]:
    """What becomes of every weight. ``recipes`` are those of all linears and experts that are swapped, by FQN."""
    uses = {}
    for name, weight in weights.items():
        gemms = [gemm for fqn in weight.multipliers if fqn in recipes for gemm in recipes[fqn].gemms]
        quantized = sum(gemm.format is not None for gemm in gemms) / len(gemms) if gemms else 0.0
        uses[name] = WeightUse(math.prod(weight.shape) * weight.share * len(weight.multipliers), quantized, weight.note)
    return uses


@dataclass(frozen=True)
class ToMXNorm:
    """An RMSNorm becomes an MXNorm.

    Attributes:
        feeds: FQNs of the linears that take its result; the plan makes them MXNormLinear.
        eps: None keeps the norm's own.
        grouped: whether the linears are one GEMM each way.
        mixture: the mixture of experts that takes its result; ``feeds`` are then linears of its shared experts.
        ratio: as in ``RMSEstimate``.
    """

    norm: NormFacts
    feeds: tuple[str, ...]
    p: int
    estimator: str
    eps: float | None
    recipe: LinearRecipe
    mode: str
    seed: int
    grouped: bool = False
    mixture: MixtureFacts | None = None
    ratio: float = 1.0

    def __str__(self) -> str:
        fed = self.feeds if self.mixture is None else (self.mixture.gate, *self.feeds, self.mixture.experts)
        kind = "GatedMXNorm" if self.norm.group_size else "MXNorm"
        names = ", ".join(fqn.rpartition(".")[2] for fqn in fed)
        return f"{kind}{' with the exact RMS' if self.estimator == 'exact' else ''}, feeds {names}"

    def build(self, fqn: str, old: nn.Module) -> MXNorm:
        norm = self.norm.as_norm(old)
        kind, common = GatedMXNorm if self.norm.group_size else MXNorm, dict(recipe=self.recipe, mode=self.mode)
        new = kind.from_rms_norm(norm, p=self.p, estimator=self.estimator, eps=self.eps, **common)
        new.estimate = replace(new.estimate, ratio=self.ratio)
        if self.norm.group_size:
            new.groups = new.normalized_shape[0] // self.norm.group_size
        new.set_seed(self.seed, fqn)
        new.feeds_mixture = self.mixture is not None
        new.scores_first = self.mixture is not None and self.mixture.scores_first
        return new


@dataclass(frozen=True)
class ToQuantized:
    """A linear or stacked experts become a layer of class ``kind``.

    Linears become MXNormLinear behind an MXNorm, MXLinear elsewhere; experts become QuantizedExperts.
    """

    kind: type[QuantizedLayer]
    recipe: LinearRecipe
    mode: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind.__name__}, {self.recipe.name}"

    def build(self, fqn: str, old: nn.Module) -> QuantizedLayer:
        make = QuantizedExperts.from_experts if self.kind is QuantizedExperts else self.kind.from_linear
        new = make(old, recipe=self.recipe, mode=self.mode)
        new.set_seed(self.seed, fqn)
        return new


@dataclass(frozen=True)
class ToFusedNorm:
    """An RMSNorm becomes a FusedRMSNorm, or a LayerNorm a FusedLayerNorm."""

    norm: NormFacts
    when_compiled: str

    def __str__(self) -> str:
        return FUSED_NORMS[self.norm.kind].__name__

    def build(self, fqn: str, old: nn.Module) -> FusedNorm:
        return FUSED_NORMS[self.norm.kind].from_norm(self.norm.as_norm(old), when_compiled=self.when_compiled)


@dataclass(frozen=True)
class ToRouter:
    """The gate of a router becomes a DecomposeKRouter, or an MXNormRouter behind an MXNorm."""

    kind: type[DecomposeKRouter] | type[MXNormRouter]

    def __str__(self) -> str:
        return f"{self.kind.__name__}, in high precision"

    def build(self, fqn: str, old: nn.Linear) -> DecomposeKRouter | MXNormRouter:
        return self.kind.from_linear(old)


Swap = ToMXNorm | ToQuantized | ToFusedNorm | ToRouter
"""``build`` returns the module that takes the place of ``old``, called ``fqn``; they share the parameters"""


def _percent(share: float) -> str:
    """A share with one decimal; 0 and 100 have none and are exact."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    if 0 < share < 0.0005:
        return "less than 0.1 %"
    if 0.9995 <= share < 1:
        return "more than 99.9 %"
    return f"{100 * share:.1f} %"


# A number in an FQN, such as a layer's; not a number in the middle of a text.
_NUMBER = re.compile(r"(?<=[A-Za-z_]\.)\d+\b")


def folded(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Lines about modules -> FQNs of the modules in each line. Modules that differ only in numbers share a line.

    Args:
        texts: FQN of a module -> text about the module: two layers give "layers.0-1.wo: MXLinear, mxfp8".
    """
    alike = defaultdict(list)
    for fqn, text in texts.items():
        alike[_NUMBER.sub("*", fqn), _NUMBER.sub("*", text)].append(fqn)
    lines = {}
    for (_, text), all_fqns in alike.items():
        parts = defaultdict(list)
        for fqn in all_fqns:
            parts[() if _is_full(all_fqns) else tuple(_NUMBER.findall(fqn)[:-1])].append(fqn)
        for fqns in parts.values():
            ranges = map(_ranges, zip(*map(_numbers, fqns)))
            name = _NUMBER.sub(lambda _: next(ranges), fqns[0])  # noqa: B023
            lines[f"{name}: {text if len(fqns) > 1 else texts[fqns[0]]}"] = fqns
    return lines


def _numbers(fqn: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(fqn)]


def _is_full(fqns: list[str]) -> bool:
    """Return whether each number of these FQNs occurs with each of the others, so that ranges name no other module."""
    return math.prod(len({*column}) for column in zip(*map(_numbers, fqns))) == len(fqns)


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers in words: "0-3" or "0,2,3"."""
    ordered = sorted({*numbers})
    is_range = len(ordered) > 1 and ordered == [*range(ordered[0], ordered[-1] + 1)]
    return f"{ordered[0]}-{ordered[-1]}" if is_range else ",".join(map(str, ordered))


@dataclass(frozen=True)
class Plan:
    """The conversion of one model by one converter.

    Attributes:
        swaps: FQN of a module -> what it becomes.
        skipped: FQN of all norms, linears, experts and gates that the converter looked at and keeps -> the reason.
        weights: every parameter with two or more dimensions -> its multiplications, and whether they are quantized;
            empty for converters without recipes.
        notes: in words, how many blocks stay.
        converter: its name, recipe, p and mode, in words: "mxnorm mxfp8 p=2, mode native".
    """

    swaps: Mapping[str, Swap] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, WeightUse] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    converter: str = ""

    def _swaps_to(self, kind: type) -> dict[str, Swap]:
        return {fqn: swap for fqn, swap in self.swaps.items() if isinstance(swap, kind)}

    @property
    def norms(self) -> dict[str, list[str]]:
        """FQN of every norm that becomes an MXNorm -> FQNs of the linears it feeds, which become MXNormLinear."""
        return {fqn: list(swap.feeds) for fqn, swap in self._swaps_to(ToMXNorm).items()}

    @property
    def feeds(self) -> dict[str, list[str]]:
        """As ``norms``, with the experts of ``mixtures``."""
        return self.norms | {fqn: [*self.norms[fqn], mixture.experts] for fqn, mixture in self.mixtures.items()}

    @property
    def mixtures(self) -> dict[str, MixtureFacts]:
        """The norms among ``norms`` that feed a mixture of experts -> the mixture."""
        return {fqn: swap.mixture for fqn, swap in self._swaps_to(ToMXNorm).items() if swap.mixture is not None}

    @property
    def groups(self) -> dict[str, list[str]]:
        """The norms among ``norms`` whose linears are one GEMM each way."""
        return {fqn: linears for fqn, linears in self.norms.items() if self.swaps[fqn].grouped}

    @property
    def linears(self) -> list[str]:
        """FQNs of the linears that become MXLinear."""
        return [fqn for fqn, swap in self._swaps_to(ToQuantized).items() if swap.kind is MXLinear]

    @property
    def experts(self) -> list[str]:
        """FQNs of the stacked experts that become QuantizedExperts."""
        return [fqn for fqn, swap in self._swaps_to(ToQuantized).items() if swap.kind is QuantizedExperts]

    @property
    def fused_norms(self) -> list[str]:
        """FQNs of the norms that become FusedRMSNorm or FusedLayerNorm."""
        return list(self._swaps_to(ToFusedNorm))

    @property
    def gates(self) -> list[str]:
        """FQNs of the gates that become DecomposeKRouter or MXNormRouter."""
        return list(self._swaps_to(ToRouter))

    @property
    def quantized_share(self) -> float:
        """Share of the multiplications by weights that are quantized, 0 to 1 (see ``find_weights``)."""
        if not self.weights:
            return 0.0
        return sum(use.multiplications * use.quantized for use in self.weights.values()) / self._multiplications

    @property
    def _multiplications(self) -> float:
        return sum(use.multiplications for use in self.weights.values())

    @property
    def headline(self) -> str:
        """The converter, numbers of swapped and kept modules, and the share of multiplications that is quantized."""
        counts = [
            (len(self.norms) + len(self.fused_norms), "norm", "norms"),
            (sum(map(len, self.norms.values())) + len(self.linears), "linear", "linears"),
            (len(self.experts), "stack of experts", "stacks of experts"),
            (len(self.gates), "gate", "gates"),
        ]
        words = [f"{count} {one if count == 1 else many}" for count, one, many in counts if count]
        swapped = " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
        line = f"{self.converter}: {swapped or 'nothing'} swapped, {len(self.skipped)} kept"
        if not self.weights:
            return line
        return f"{line}; {_percent(self.quantized_share)} of the weights' multiplications are quantized"

    @property
    def details(self) -> str:
        """The notes, and what every module becomes or why it stays.

        Layers with the same text share a line. Modules in high precision have their share of the multiplications.
        """
        lines = [f"  {note}" for note in self.notes]
        texts = {fqn: str(swap) for fqn, swap in self.swaps.items()}
        texts |= {fqn: f"kept because it {reason}" for fqn, reason in self.skipped.items()}
        shares, total = Counter[str](), self._multiplications
        for name, use in self.weights.items():
            if not use.quantized:
                module = name.rpartition(".")[0]
                fqn = module if module in texts else name
                note = use.note and f", {use.note}"  # the same for all weights of experts
                texts[fqn] = texts.get(fqn, "in high precision").removesuffix(note) + note
                shares[fqn] += use.multiplications / total
        for line, fqns in folded(texts).items():
            share = sum(shares[fqn] for fqn in fqns)
            lines.append(f"  {line}; {_percent(share)} of the multiplications" if share else f"  {line}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.headline}\n{self.details}"
