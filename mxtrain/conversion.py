"""Find the linears that a norm feeds, and swap norms and linears in place.

Which linears belong to which norm is not guessed from names. One forward pass on the meta device (no data, no
arithmetic) shows every use of every norm's output; a norm is swapped only if all of them are ``nn.Linear`` modules,
each called once, so that the quantized result of the norm can take the place of its tensor.
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from mxtrain.errors import ConfigError, require_one_of
from mxtrain.hardware import resolve_mode
from mxtrain.nn.mx_linear import MXLinear
from mxtrain.nn.mxnorm import MXNorm, MXNormLinear
from mxtrain.nn.three_gemms import check_features
from mxtrain.recipe import RMSEstimate, get_recipe

CONVERTERS = ("mxnorm", "mx_linear")

# What a module may ask of a NormedInput besides multiplying it.
_HARMLESS = {torch.Tensor.shape.__get__}


@dataclass
class Report:
    """What a conversion did.

    Attributes:
        norms: FQN of every swapped norm -> FQNs of the linears it feeds (now MXNormLinear).
        linears: FQNs of the linears that became MXLinear.
        skipped: FQN of every norm and linear left as it was -> the reason.
    """

    norms: dict[str, list[str]] = field(default_factory=dict)
    linears: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        fed = sum(map(len, self.norms.values()))
        lines = [
            f"swapped {len(self.norms)} norms with the {fed} linears they feed, and {len(self.linears)} other linears; "
            f"left {len(self.skipped)} as they were"
        ]
        lines += [f"  {norm} -> {', '.join(linears)}" for norm, linears in self.norms.items()]
        lines += [f"  {linear}" for linear in self.linears]
        lines += [f"  left: {fqn}: {reason}" for fqn, reason in self.skipped.items()]
        return "\n".join(lines)


def matches(fqn: str, pattern: str) -> bool:
    """Whether ``pattern`` names ``fqn``: its segments, each a literal or a glob, match a run of whole segments.

    ``layers.1`` names ``layers.1`` and everything in it, but not ``layers.10``; ``*.wo`` and ``wo`` name every wo.
    """
    names, globs = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(name, glob) for name, glob in zip(names[start:], globs))
        for start in range(len(names) - len(globs) + 1)
    )


def convert(
    model: nn.Module,
    converter: str = "mxnorm",
    *,
    p: int = 2,
    recipe="mxfp8",
    estimator: str = "pre_round",
    scale_rounding: str | None = None,
    mode: str = "auto",
    eps: float | None = None,
    filter_fqns: Iterable[str] = ("output",),
    example_inputs: tuple | None = None,
) -> Report:
    """Swap norms and linears of ``model`` in place. Parameters and their FQNs stay, so checkpoints load either way.

    ``"mxnorm"`` turns every RMSNorm that feeds only linears into an MXNorm, those linears into MXNormLinear, and the
    other linears into MXLinear. ``"mx_linear"`` keeps the norms and turns every linear into MXLinear.

    Args:
        model: any module tree, on any device, meta included.
        converter: "mxnorm" or "mx_linear".
        p, recipe, estimator, scale_rounding, mode: see ``mxtrain.mxnorm_cast``.
        eps: for the squared RMS estimate; None keeps the eps of each norm.
        filter_fqns: names of modules to leave alone (see ``matches``).
        example_inputs: arguments for one forward pass of ``model``, of any device; only shapes and dtypes matter.
            None stands for one row of 32 token ids.

    Returns:
        Report: what was swapped, and what was left and why.

    Raises:
        ConfigError: for an unknown setting, a filter that matches no module, features that no block divides, a forward
            pass that fails on the meta device, or a model with nothing to convert. The model is then unchanged.
    """
    require_one_of("converter", converter, CONVERTERS)
    recipe = get_recipe(recipe, scale_rounding)
    RMSEstimate.for_recipe(recipe, p, estimator, 0.0 if eps is None else eps)
    resolve_mode(mode)
    filtered = _filtered(model, tuple(filter_fqns))

    report = Report()
    if converter == "mxnorm":
        _plan_norms(model, filtered, example_inputs, report)
    fed = {linear for linears in report.norms.values() for linear in linears}
    _plan_linears(model, filtered, fed, report)
    if not (report.norms if converter == "mxnorm" else report.linears):
        left = "".join(f"\n  {fqn}: {reason}" for fqn, reason in report.skipped.items())
        raise ConfigError(f"converter = {converter!r} finds nothing to convert in this {type(model).__name__}{left}")

    for fqn in (*fed, *report.linears):
        linear = model.get_submodule(fqn)
        try:
            check_features(linear.in_features, linear.out_features, recipe)
        except ConfigError as error:
            raise ConfigError(f"{fqn}: {error}; name it in filter_fqns to leave it in high precision") from None

    for fqn, linears in report.norms.items():
        norm = model.get_submodule(fqn)
        new = MXNorm.from_rms_norm(norm, p=p, estimator=estimator, eps=eps, recipe=recipe, mode=mode)
        _replace(model, fqn, new)
        for linear in linears:
            _replace(model, linear, MXNormLinear.from_linear(model.get_submodule(linear), recipe=recipe, mode=mode))
    for linear in report.linears:
        _replace(model, linear, MXLinear.from_linear(model.get_submodule(linear), recipe=recipe, mode=mode))
    return report


def _filtered(model: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    """FQNs that any pattern names; ConfigError for a pattern that names none."""
    fqns = [fqn for fqn, _ in model.named_modules() if fqn]
    hits = {pattern: {fqn for fqn in fqns if matches(fqn, pattern)} for pattern in patterns}
    for pattern, hit in hits.items():
        if not hit:
            top = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(f"filter_fqns: {pattern!r} matches no module; the top-level modules are: {top}")
    return set().union(*hits.values()) if hits else set()


def _plan_norms(model: nn.Module, filtered: set[str], example_inputs: tuple | None, report: Report) -> None:
    """Sort every RMSNorm into ``report.norms`` or ``report.skipped``."""
    norms = {fqn: module for fqn, module in model.named_modules() if type(module) is nn.RMSNorm}
    if not norms:
        return
    uses = _watch_norms(model, norms, example_inputs)
    for fqn in norms:
        linears, others = uses.linears[fqn], uses.others[fqn]
        if fqn in filtered:
            report.skipped[fqn] = "named in filter_fqns"
        elif len(norms[fqn].normalized_shape) != 1:
            report.skipped[fqn] = "normalizes more than one dimension"
        elif others:
            report.skipped[fqn] = f"its output is used by {', '.join(sorted(others))}"
        elif not linears:
            unfollowed = f"; not followed: {uses.unfollowed[0]}" if uses.unfollowed else ""
            report.skipped[fqn] = f"no linear was seen to use its output{unfollowed}"
        elif kept := [linear for linear in linears if linear in filtered]:
            report.skipped[fqn] = f"feeds {', '.join(kept)}, named in filter_fqns"
        elif again := [linear for linear in linears if uses.calls[linear] != 1]:
            report.skipped[fqn] = f"feeds {', '.join(again)}, which is called more than once"
        else:
            report.norms[fqn] = linears


def _plan_linears(model: nn.Module, filtered: set[str], fed: set[str], report: Report) -> None:
    """Sort every linear that no swapped norm feeds into ``report.linears`` or ``report.skipped``."""
    shared = _shared_parameters(model)
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.Linear) or fqn in fed:
            continue
        if fqn in filtered:
            report.skipped[fqn] = "named in filter_fqns"
        elif type(module) is not nn.Linear:
            report.skipped[fqn] = f"is a {type(module).__name__}"
        elif id(module.weight) in shared:
            report.skipped[fqn] = "shares its weight with another module"
        else:
            report.linears.append(fqn)


def _shared_parameters(model: nn.Module) -> set[int]:
    """ids of parameters that more than one module owns."""
    seen, shared = set(), set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _replace(model: nn.Module, fqn: str, module: nn.Module) -> None:
    parent, _, name = fqn.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


class _Uses(TorchFunctionMode):
    """Records what happens to the outputs of norms during one forward pass.

    Attributes:
        linears: norm FQN -> FQNs of the nn.Linear modules that multiplied its output, in order.
        others: norm FQN -> what else used its output.
        calls: linear FQN -> how often it was called at all.
        unfollowed: modules that could not be run, and why.
    """

    def __init__(self, norms: Iterable[str], weights: dict[int, str]):
        super().__init__()
        self.linears = {fqn: [] for fqn in norms}
        self.others = {fqn: set() for fqn in norms}
        self.calls = dict.fromkeys(weights.values(), 0)
        self.unfollowed: list[str] = []
        self._weights = weights
        # Outputs are kept alive: the id of a collected tensor would be given to another one.
        self._outputs: dict[int, tuple[str, torch.Tensor]] = {}

    def track(self, fqn: str, output: torch.Tensor) -> None:
        self._outputs[id(output)] = (fqn, output)

    def note_other_use(self, values, user: str) -> None:
        for norm in self._norms_of(values):
            self.others[norm].add(user)

    def note_unfollowed(self, module: str, values, error: Exception) -> None:
        """A module failed half-way: nothing is known of the norms in it, nor of outputs that were passed to it."""
        first_line = (str(error).splitlines() or [""])[0]
        reason = f"{module}, which fails on the meta device ({type(error).__name__}: {first_line})"
        self.unfollowed.append(reason)
        self.note_other_use(values, reason)
        for norm in self.others:
            if norm.startswith(module + "."):
                self.others[norm].add(reason)

    def _norms_of(self, values) -> list[str]:
        return [self._outputs[id(v)][0] for v in tree_flatten(values)[0] if id(v) in self._outputs]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        linear = None
        if func is nn.functional.linear:
            linear = self._weights.get(id(args[1] if len(args) > 1 else kwargs["weight"]))
        if linear is not None:
            self.calls[linear] += 1
            for norm in self._norms_of(args[:1] or kwargs["input"]):
                self.linears[norm].append(linear)
        elif func not in _HARMLESS:
            # A property's getter is called __get__; the property itself has the telling name.
            named = getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else func
            self.note_other_use((args, kwargs), getattr(named, "__name__", str(func)))
        return func(*args, **kwargs)


def _watch_norms(model: nn.Module, norms: dict[str, nn.RMSNorm], example_inputs: tuple | None) -> _Uses:
    """Run ``model`` once on the meta device and record the uses of the outputs of ``norms``.

    A module that cannot run there (data-dependent routing, kernels without a meta version) is stepped over as if it
    returned something shaped like its first argument, and whatever it touched counts as used in an unknown way.
    """
    if example_inputs is None:
        example_inputs = (torch.zeros(1, 32, dtype=torch.long),)
    inputs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), example_inputs)
    shared = _shared_parameters(model)
    tensors = {name: t.to("meta") for name, t in (*model.named_parameters(), *model.named_buffers())}
    weights = {
        id(tensors[f"{fqn}.weight"]): fqn
        for fqn, module in model.named_modules()
        if type(module) is nn.Linear and id(module.weight) not in shared
    }
    uses = _Uses(norms, weights)

    def watched(fqn: str, module: nn.Module):
        forward = module.forward

        def run(*args, **kwargs):
            try:
                output = forward(*args, **kwargs)
            except Exception as error:
                tensors_in = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
                if not tensors_in:
                    raise
                uses.note_unfollowed(fqn, (args, kwargs), error)
                return torch.empty(tensors_in[0].shape, dtype=tensors_in[0].dtype, device="meta")
            if fqn in norms:
                uses.track(fqn, output)
            return output

        return run

    submodules = [(fqn, module) for fqn, module in model.named_modules() if fqn]
    overridden = {module: module.__dict__["forward"] for _, module in submodules if "forward" in module.__dict__}
    try:
        for fqn, module in submodules:
            module.forward = watched(fqn, module)
        with torch.no_grad(), uses:
            uses.note_other_use(torch.func.functional_call(model, tensors, inputs), "the caller of the model")
    except Exception as error:
        raise ConfigError(
            f"converter = 'mxnorm' cannot see which linears the norms of this {type(model).__name__} feed: one forward "
            f"pass on the meta device failed with {type(error).__name__}: {error}"
        ) from error
    finally:
        for _, module in submodules:
            module.__dict__.pop("forward", None)
        for module, forward in overridden.items():
            module.forward = forward
    return uses
