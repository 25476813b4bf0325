"""Diagnostics of a run: every N steps, an extra pass measures the norms, linears and experts that were swapped.

Hooks on modules inside of a compiled block do not run, or break its graph. So training is left as it is, and before
the first microbatch of such a step the trainer runs its own forward and backward once more: eagerly, with hooks, on
the step's own text and weights. Compiled blocks (``force_eager``), FSDP2, tensor and context parallelism, activation
checkpointing and pipelines need nothing special, because this pass is theirs. Without a pipeline it takes as many
sequences as hold ``tokens``; a pipeline takes its whole microbatch, of which the first chunk is measured.

The pass leaves no trace: quantized linears and experts make no gradients of their weights, and other gradients are
removed; random number generators and buffers get their values back; the trainer sets the position of stochastic
rounding before every microbatch. Training gives the same bits with diagnostics and without.

A linear makes its casts and products when its output gradient arrives: FSDP2 has its weight gathered then.

Hooks see a module's first forward, not the one that checkpointing repeats. So they may not use operations whose results
selective checkpointing keeps, such as products: it would give them to the repeated forward.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial, reduce

import torch
from torch.distributed.fsdp import FSDPModule

from mxtrain.analysis.metrics_file import NUMERICS
from mxtrain.analysis.numerics import MODEL
from mxtrain.conversion.survey import matches
from mxtrain.diagnostics.experts import expert_figures, expert_totals, router_figures, router_totals
from mxtrain.diagnostics.linears import Input, linear_figures, linear_totals, norm_to_noise
from mxtrain.diagnostics.norms import norm_figures, norm_totals
from mxtrain.diagnostics.totals import Totals, combined, numbers
from mxtrain.errors import ConfigError
from mxtrain.formats.hardware import MERGED
from mxtrain.formats.mx.merged import GROUP as MERGED_GROUP
from mxtrain.formats.recipe import LONGEST_BLOCK
from mxtrain.nn.experts import QuantizedExperts, kept_buffers
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.normed_input import NormedInput, RoutedRows
from mxtrain.nn.three_gemms import QuantizedLayer, QuantizedLinear, compute_dtype
from mxtrain.parallel.initial_weights import plain_name
from mxtrain.ranks import gather, is_first

FQNS = "mxnorm.diagnostics.fqns"
NORM, EXPERTS, ROUTER = "norm", "experts", "router"
_FIGURES = {NORM: norm_figures, EXPERTS: expert_figures, ROUTER: router_figures}

GROUP = LONGEST_BLOCK
"""Tokens in a group. Wgrad casts in blocks along tokens, so groups begin where blocks do"""


@lru_cache(maxsize=16)  # all modules of a model have the same few numbers of tokens
def sampled_tokens(available: int, wanted: int, device: torch.device, mode: str = "") -> torch.Tensor:
    """Return the indices of at most ``wanted`` of ``available`` tokens, int64: groups of 32, spread over the batch.

    At least one group is taken if there is one. Fewer than 32 tokens give no index. Mode "fp8_merged" merges 128
    tokens, so its groups are larger.
    """
    size = MERGED_GROUP if mode == MERGED and available >= MERGED_GROUP else GROUP
    groups = available // size
    taken = min(groups, max(1, wanted // size))
    first = torch.arange(taken, device=device) * groups // max(taken, 1) * size
    return (first.unsqueeze(1) + torch.arange(size, device=device)).flatten()


class Numerics:
    """Measures a model every ``every`` steps.

    Args:
        fqns: patterns of the modules to measure; None for all that a converter has swapped.
        tokens: number of tokens to measure per process.
        model_parts: the trainer's: the model, or the stages of a pipeline on this process.
        finds_shapes: whether the forward that runs now is one with which a pipeline finds out shapes.
        name_of: the name of a module in patterns and figures, from its FQN.
    """

    def __init__(
        self,
        every: int,
        fqns: list[str] | None,
        tokens: int,
        model_parts: list[torch.nn.Module],
        finds_shapes: Callable[[], bool] = lambda: False,
        name_of: Callable[[str], str] = plain_name,
    ):
        self.every, self.tokens, self._parts, self._finds_shapes = every, tokens, model_parts, finds_shapes
        modules = {name_of(fqn): module for part in model_parts for fqn, module in part.named_modules()}
        is_watched = {fqn: fqns is None or any(matches(fqn, pattern) for pattern in fqns) for fqn in modules}
        watched = [(fqn, module) for fqn, module in modules.items() if is_watched[fqn]]
        routers = {router_beside(fqn) for fqn, module in modules.items() if isinstance(module, QuantizedExperts)}
        after = {MXNorm: self._after_norm, QuantizedLinear: self._after_linear, QuantizedExperts: self._after_experts}
        self._hooks = [
            (module, partial(hook, fqn))
            for kind, hook in after.items()
            for fqn, module in watched
            if isinstance(module, kind)
        ]
        self._hooks += [(module, partial(self._after_router, fqn)) for fqn, module in watched if fqn in routers]
        self._found: dict[tuple[str, str], Totals] = {}
        self._seen: set[str] = set()

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def sample(self, input_dict: dict, labels: torch.Tensor) -> tuple[dict, torch.Tensor]:
        """Return the first sequences of a microbatch [B, S], as many as hold the tokens to measure."""
        count = math.ceil(self.tokens / labels.shape[1])
        inputs = {key: part[:count] if torch.is_tensor(part) else part for key, part in input_dict.items()}
        return inputs, labels[:count]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Measure one forward and backward inside of the context, and undo what they change."""
        self._found, self._seen = {}, set()
        with ExitStack() as stack:
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(kept_buffers(self._parts))
            stack.enter_context(_replaced(self._attributes_of_a_pass()))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module, hook in self._hooks:
                # Before the hooks of tensor parallelism, which make DTensors of the results.
                stack.callback(module.register_forward_hook(hook, prepend=True, with_kwargs=True).remove)
            yield

    def _attributes_of_a_pass(self) -> Iterator[tuple[object, str, object]]:
        modules = [module for part in self._parts for module in part.modules()]
        for module in modules:
            if isinstance(module, FSDPModule):
                # After a validation some weights are still whole, and then are not the parameters with the gradients.
                module.reshard()
            if isinstance(module, QuantizedLayer):
                yield module, "runs_wgrad", False  # the pass would only throw the weights' gradients away
            if isinstance(module, MXNorm) and module.split is not None:
                # Norms send their input, not codes: linears have values, with equal results.
                yield module, "split", replace(module.split, gather="high_precision")
        for parameter in [parameter for part in self._parts for parameter in part.parameters()]:
            yield parameter, "grad", None

    def figures(self) -> dict[str, float]:
        """Return the figures of the last recording over all processes, by their keys; empty except on rank 0."""
        of_ranks = gather(numbers(self._found))
        return figures_of(of_ranks) if is_first() else {}

    def _is_new(self, fqn: str) -> bool:
        """Whether this is a module's first forward: not another chunk, nor one that checkpointing repeats."""
        if self._finds_shapes() or fqn in self._seen:
            return False
        self._seen.add(fqn)
        return True

    @torch.no_grad()
    def _after_norm(
        self, fqn: str, norm: MXNorm, args: tuple, kwargs: dict, result: NormedInput | torch.Tensor
    ) -> None:
        if norm.is_plain or not self._is_new(fqn):
            return
        x, *gate = *args, *kwargs.values()
        rows = result.x.view(result.rho.numel(), -1) if gate else x.reshape(-1, x.shape[-1])  # groups are rows
        if len(index := sampled_tokens(len(rows), self.tokens, rows.device)):
            self._found[fqn, NORM] = norm_totals(rows[index], norm.estimate, norm.recipe.fprop)

    @torch.no_grad()
    def _after_linear(self, fqn: str, linear: QuantizedLinear, args: tuple, kwargs: dict, y: torch.Tensor) -> None:
        if not y.requires_grad or linear.layer_state.is_plain or not self._is_new(fqn):
            return
        (x,) = *args, *kwargs.values()
        rows = x.x if isinstance(x, NormedInput) else x.reshape(-1, x.shape[-1])
        index = sampled_tokens(len(rows), self.tokens, rows.device, linear.gemms(rows.device).mode)
        if len(index):
            signs = x.signs if isinstance(x, NormedInput) and x.signs is not None else linear.signs(rows.device)
            if isinstance(x, NormedInput):
                gain = None if x.gain is None else x.gain.clone()  # FSDP2 frees the memory of the gathered one
                given = Input(rows[index], x.rho[index], gain, x.made_by.estimate, linear.split.x)
            else:
                given = Input(rows[index].to(compute_dtype(x)), group=linear.split.x)

            def at_gradient(gradients) -> None:
                if (dy := gradients[0]) is not None:
                    with torch.no_grad():
                        self._measure_linear(fqn, linear, given, dy.reshape(-1, dy.shape[-1])[index], signs)

            # A hook of the node runs after the hooks of its result, in which FSDP2 gathers weights.
            y.grad_fn.register_prehook(at_gradient)

    def _measure_linear(
        self, fqn: str, linear: QuantizedLinear, given: Input, dy: torch.Tensor, signs: torch.Tensor | None
    ) -> None:
        with torch.enable_grad():  # without, a layer takes no random bits
            draws = linear.draws(dy.device)
        found = linear_totals(linear.gemms(dy.device), given, linear.parts()[0].detach(), dy, signs, draws)
        self._found |= {(fqn, name): totals for name, totals in found.items()}

    def _after_experts(self, fqn: str, experts: QuantizedExperts, args: tuple, kwargs: dict, y: torch.Tensor) -> None:
        if y.requires_grad and self._is_new(fqn):
            x, counts = *args, *kwargs.values()
            x = x.values() if isinstance(x, RoutedRows) else x
            rows = x.detach().to(compute_dtype(x))  # autocast is off in the backward

            def at_gradient(gradients) -> None:
                if gradients[0] is not None:
                    self._measure_experts(fqn, experts, rows, counts, gradients[0].to(rows.dtype))

            y.grad_fn.register_prehook(at_gradient)

    def _measure_experts(
        self, fqn: str, experts: QuantizedExperts, rows: torch.Tensor, counts: torch.Tensor, dy: torch.Tensor
    ) -> None:
        if experts.recipe.quantizes:
            self._found[fqn, EXPERTS] = expert_totals(experts, rows, counts, dy)

    def _after_router(self, fqn: str, router: torch.nn.Module, args: tuple, kwargs: dict, result: tuple) -> None:
        scores, chosen, _ = result
        if scores.requires_grad and self._is_new(fqn):
            x, bias = *args, *kwargs.values()

            def at_gradient(_) -> None:
                with torch.no_grad():
                    self._found[fqn, ROUTER] = router_totals(router, x, bias, chosen)

            scores.grad_fn.register_prehook(at_gradient)


def router_beside(experts: str) -> str:
    """Return the FQN of the router of the experts with this FQN."""
    return f"{experts.rpartition('.')[0]}.router".removeprefix(".")


def check_patterns(patterns: list[str] | None, model: torch.nn.Module) -> None:
    """Raise ConfigError for a pattern that matches nothing that is swapped, and no router beside swapped experts."""
    kinds = MXNorm | QuantizedLinear | QuantizedExperts
    swapped = {fqn: module for fqn, module in model.named_modules() if isinstance(module, kinds)}
    swapped = [*swapped, *(router_beside(fqn) for fqn in swapped if isinstance(swapped[fqn], QuantizedExperts))]
    for pattern in patterns or []:
        if not any(matches(fqn, pattern) for fqn in swapped):
            raise ConfigError(
                f"{FQNS} = {patterns!r}: {pattern!r} matches no swapped norm, linear or experts; "
                f"'mxtrain doctor --model CONFIG' lists them, such as {swapped[0]!r}"
            )


def figures_of(ranks: list[dict[tuple[str, str], Totals]]) -> dict[str, float]:
    """Return the figures of a model by their keys, from the totals of all processes.

    Processes that have the same module hold other tokens of it, or other parts of its matrices.
    """
    of_modules: dict[str, dict[str, Totals]] = defaultdict(dict)
    for rank in ranks:
        for (fqn, name), totals in rank.items():
            found = of_modules[fqn]
            found[name] = combined(found[name], totals) if name in found else totals
    figures = {}
    for fqn, found in of_modules.items():
        kind = next((kind for kind in _FIGURES if kind in found), None)
        own = linear_figures(found) if kind is None else _FIGURES[kind](found[kind])
        figures |= {f"{NUMERICS}{fqn}/{name}": value for name, value in own.items()}
    if gradients := [found["wgrad"] for found in of_modules.values() if "wgrad" in found]:
        figures[f"{NUMERICS}{MODEL}/grad_norm_to_noise"] = norm_to_noise(reduce(combined, gradients))
    return {key: float(f"{value:.6g}") for key, value in figures.items()}


@contextmanager
def _replaced(attributes: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    """Give attributes of objects other values inside of the context."""
    before = []
    try:
        for owner, name, value in attributes:
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
