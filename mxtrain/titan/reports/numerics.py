"""Diagnostics of a run: every N steps, an extra pass measures the norms and linears that a converter has swapped.

Hooks on modules inside of a compiled block do not run, or break its graph. So training is left as it is, and before
the first microbatch of such a step the trainer runs its own forward and backward once more: eagerly, with hooks, on
the step's own text and weights. Compiled blocks (``force_eager``), FSDP2, tensor and context parallelism, activation
checkpointing and pipelines need nothing special, because this pass is theirs. Without a pipeline it takes as many
sequences as hold ``tokens``; a pipeline takes its whole microbatch, of which the first chunk is measured.

The pass leaves no trace: quantized linears make no gradients of their weights, and other gradients are removed; random
number generators and buffers get their values back; the trainer sets the position of stochastic rounding before every
microbatch. Training gives the same bits with diagnostics and without.

A linear makes its casts and products when its output gradient arrives: FSDP2 has its weight gathered then. Linears that
get the same tensor share its sample until the last of them has done so. Casts of several linears are measured together.

Hooks see a module's first forward, not the one that checkpointing repeats. So they may not use operations whose results
selective checkpointing keeps, such as products: it would give them to the repeated forward.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, reduce
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakTensorKeyDictionary

from mxtrain.analysis.numerics import MODEL, PREFIX
from mxtrain.conversion.selection import matches
from mxtrain.diagnostics.casts import MeasuredCast, cast_totals
from mxtrain.diagnostics.linears import Gradient, Input, linear_figures, products_and_casts
from mxtrain.diagnostics.norms import norm_figures, norm_totals
from mxtrain.diagnostics.products import norm_to_noise
from mxtrain.diagnostics.sample import sampled_tokens
from mxtrain.diagnostics.totals import Totals, combined, numbers
from mxtrain.errors import ConfigError
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.normed_input import NormedInput
from mxtrain.nn.three_gemms import QuantizedLinear, compute_dtype
from mxtrain.parallel.initial_weights import plain_name
from mxtrain.settings.mxnorm_section import quantizing_among
from mxtrain.titan.buffers import kept_buffers
from mxtrain.titan.repairs.pipeline import Stage

FQNS = "mxnorm.diagnostics.fqns"
NORM = "norm"

CASTS_AT_ONCE = 2**26
"""
Casts are measured together once they have this many elements, and the rest at the end. An element takes up to 16 bytes
"""


class Numerics:
    """Measures a model every ``every`` steps.

    Args:
        every: number of steps, at least 1.
        fqns: patterns of the modules to measure; None for all that a converter has swapped.
        tokens: number of tokens to measure per process.
        model_parts: the trainer's: the model, or the stages of a pipeline on this process.
    """

    def __init__(self, every: int, fqns: list[str] | None, tokens: int, model_parts: list[torch.nn.Module]):
        self.every, self.tokens, self._parts = every, tokens, model_parts
        modules = {plain_name(fqn): module for part in model_parts for fqn, module in part.named_modules()}
        self._norms = {fqn: module for fqn, module in modules.items() if isinstance(module, MXNorm)}
        self._linears = {
            fqn: module
            for fqn, module in modules.items()
            if isinstance(module, QuantizedLinear) and is_watched(fqn, fqns)
        }
        self._watched_norms = {fqn for fqn in self._norms if is_watched(fqn, fqns)}
        self._found: dict[tuple[str, str], Totals] = {}
        self._seen: set[str] = set()
        # By the tensor that a linear gets; of a norm's result, by its rho, which is new in every forward.
        self._estimates, self._inputs = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self._pending: dict[str, tuple[Input, torch.Tensor | None]] = {}  # with signs; by linear
        self._casts: dict[tuple[str, str], MeasuredCast] = {}  # those not yet measured

    @classmethod
    def of_job(cls, job_config, model_parts: list[torch.nn.Module]) -> "Numerics | None":
        """Return what measures this job; None if its diagnostics are off, or if nothing is swapped."""
        settings = job_config.mxnorm.diagnostics
        if settings.every == 0 or not quantizing_among(job_config.model.converters):
            return None
        return cls(settings.every, settings.fqns, settings.tokens, model_parts)

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
            for kept in (self._estimates, self._inputs, self._pending, self._casts):
                stack.callback(kept.clear)
            stack.enter_context(_unchanged(self._parts))
            stack.enter_context(_sending_inputs(self._norms.values()))
            stack.enter_context(_without_wgrad(self._parts))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for fqn, module in self._norms.items():
                after = partial(self._after_norm, fqn)
                handle = module.register_forward_hook(after, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            for fqn, module in self._linears.items():
                # Before the hooks of tensor parallelism, which make DTensors of the results.
                after = partial(self._after_linear, fqn)
                handle = module.register_forward_hook(after, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            yield
            self._measure_casts()

    def figures(self) -> dict[str, float]:
        """Return the figures of the last recording over all processes, by their keys; empty except on rank 0."""
        own = numbers(self._found)
        of_ranks = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            of_ranks = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(own, of_ranks)
        return {} if of_ranks is None else figures_of(of_ranks)

    def _is_new(self, fqn: str) -> bool:
        """Whether this is a module's first forward: not another chunk, nor one that checkpointing repeats."""
        if Stage.finds_shapes or fqn in self._seen:
            return False
        self._seen.add(fqn)
        return True

    @torch.no_grad()
    def _after_norm(
        self, fqn: str, norm: MXNorm, args: tuple, kwargs: dict, result: NormedInput | torch.Tensor
    ) -> None:
        if norm.is_plain:
            return
        self._estimates[result.rho] = norm.estimate
        if fqn in self._watched_norms and self._is_new(fqn):
            (x,) = *args, *kwargs.values()
            rows = x.reshape(-1, x.shape[-1])
            if len(index := sampled_tokens(len(rows), self.tokens, rows.device)):
                self._found[fqn, NORM] = norm_totals(rows[index], norm.estimate, norm.recipe.fprop)

    @torch.no_grad()
    def _after_linear(self, fqn: str, linear: QuantizedLinear, args: tuple, kwargs: dict, y: torch.Tensor) -> None:
        if not y.requires_grad or linear.layer_state.is_plain or not self._is_new(fqn):
            return
        (x,) = *args, *kwargs.values()
        rows = x.x if isinstance(x, NormedInput) else x.reshape(-1, x.shape[-1])
        index = sampled_tokens(len(rows), self.tokens, rows.device)
        if len(index):
            signs = x.signs if isinstance(x, NormedInput) and x.signs is not None else linear.signs(rows.device)
            self._pending[fqn] = self._input(linear, x, rows, index), signs
            # A hook of the node runs after the hooks of its result, in which FSDP2 gathers weights.
            y.grad_fn.register_prehook(partial(self._at_gradient, fqn, linear, index))

    def _input(
        self, linear: QuantizedLinear, x: torch.Tensor | NormedInput, rows: torch.Tensor, index: torch.Tensor
    ) -> Input:
        """The sample of a linear's input, the same for all linears that get this tensor."""
        source = x.rho if isinstance(x, NormedInput) else x
        samples = self._inputs.setdefault(source, {})
        made_from = (source._version, compute_dtype(source), linear.split.x)
        if made_from not in samples:
            if isinstance(x, NormedInput):
                gain = None if x.gain is None else x.gain.clone()  # FSDP2 frees the memory of the gathered one
                new = Input(rows[index], x.rho[index], gain, self._estimates[x.rho], linear.split.x)
            else:
                new = Input(rows[index].to(compute_dtype(x)), group=linear.split.x)
            samples[made_from] = new
        return samples[made_from]

    def _at_gradient(self, fqn: str, linear: QuantizedLinear, index: torch.Tensor, gradients) -> None:
        given, signs = self._pending.pop(fqn)
        (dy,) = gradients
        if dy is None:
            return
        with torch.enable_grad():  # without, a layer takes no random bits
            draws = linear.draws(dy.device)
        with torch.no_grad():
            gradient = Gradient(dy.reshape(-1, dy.shape[-1])[index], signs, draws)
            found, casts = products_and_casts(linear.gemms(dy.device), given, linear.parts()[0].detach(), gradient)
        self._found |= {(fqn, name): totals for name, totals in found.items()}
        self._casts |= {(fqn, name): cast for name, cast in casts.items()}
        if sum(cast.image.numel() for cast in {*self._casts.values()}) >= CASTS_AT_ONCE:
            self._measure_casts()

    @torch.no_grad()
    def _measure_casts(self) -> None:
        self._found |= cast_totals(self._casts)
        self._casts.clear()


def is_watched(fqn: str, patterns: list[str] | None) -> bool:
    return patterns is None or any(matches(fqn, pattern) for pattern in patterns)


def check_patterns(patterns: list[str] | None, model: torch.nn.Module) -> None:
    """Raise ConfigError for a pattern that matches no swapped norm or linear of a whole model."""
    swapped = [fqn for fqn, module in model.named_modules() if isinstance(module, MXNorm | QuantizedLinear)]
    for pattern in patterns or []:
        if not any(matches(fqn, pattern) for fqn in swapped):
            raise ConfigError(
                f"{FQNS} = {patterns!r}: {pattern!r} matches no norm or linear that is swapped; conversion.txt in the "
                f"run's folder lists them, such as {swapped[0]!r}"
                if swapped
                else f"{FQNS} = {patterns!r}: no norm or linear is swapped in this model"
            )


def figures_of(ranks: list[dict[tuple[str, str], Totals]]) -> dict[str, float]:
    """Return the figures of a model by their keys, from the totals of all processes.

    Processes that have the same module hold other tokens of it, or other parts of its matrices.
    """
    together = defaultdict(list)
    for found in ranks:
        for key, totals in found.items():
            together[key].append(totals)
    of_modules: dict[str, dict[str, Totals]] = defaultdict(dict)
    for (fqn, name), parts in together.items():
        of_modules[fqn][name] = reduce(combined, parts)
    figures = {}
    for fqn, found in of_modules.items():
        own = norm_figures(found[NORM]) if NORM in found else linear_figures(found)
        figures |= {f"{PREFIX}{fqn}/{name}": value for name, value in own.items()}
    if gradients := [found["wgrad"] for found in of_modules.values() if "wgrad" in found]:
        figures[f"{PREFIX}{MODEL}/grad_norm_to_noise"] = norm_to_noise(reduce(combined, gradients))
    return {key: float(f"{value:.6g}") for key, value in figures.items()}


@contextmanager
def _sending_inputs(norms: Iterable[MXNorm]) -> Iterator[None]:
    """Let norms of split sequences send their input, not codes: linears then have values, and results are the same."""
    splits = {norm: norm.split for norm in norms if norm.split is not None}
    try:
        for norm, split in splits.items():
            norm.split = replace(split, gather="high_precision")
        yield
    finally:
        for norm, split in splits.items():
            norm.split = split


@contextmanager
def _without_wgrad(parts: list[torch.nn.Module]) -> Iterator[None]:
    """Let quantized linears leave out the gradients of their weights, which the pass would only throw away."""
    linears = [module for part in parts for module in part.modules() if isinstance(module, QuantizedLinear)]
    try:
        for linear in linears:
            linear.runs_wgrad = False
        yield
    finally:
        for linear in linears:
            linear.runs_wgrad = True


@contextmanager
def _unchanged(parts: list[torch.nn.Module]) -> Iterator[None]:
    """Give gradients, buffers and the states of random number generators their values back after the context."""
    for module in chain.from_iterable(part.modules() for part in parts):
        if isinstance(module, FSDPModule):
            # After a validation some weights are still whole, and are then not the parameters that have the gradients.
            module.reshard()
    gradients = [(parameter, parameter.grad) for part in parts for parameter in part.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), kept_buffers(parts):
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
