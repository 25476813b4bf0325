"""See what uses the outputs of a model's norms, by watching one forward pass on the meta device.

Meta tensors have shapes and no data. The pass therefore costs no arithmetic, and works for a model of any size before
its weights exist. It is followed through the module tree and through every PyTorch function.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from threading import RLock

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from mxtrain.conversion.meta_pass import with_autocast_of_meta, with_empty_flex_attention, without_triton_launches
from mxtrain.conversion.structural_copy import without_global_hooks
from mxtrain.errors import ConfigError
from mxtrain.nn.normed_input import LOOKS
from mxtrain.nn.three_gemms import version

_LOOKS = [getattr(torch.Tensor, name) for name in LOOKS]
# Functions that a model may call on an MXNorm's result besides multiplying it. The watcher gets a method as it is, and
# the getter of an attribute.
_HARMLESS = {*_LOOKS, *(look.__get__ for look in _LOOKS)}
# The pass changes what holds for the whole process, such as torch.compile's stance. No other thread may run compiled
# code or flex_attention meanwhile.
_ONE_AT_A_TIME = RLock()
# Functions that take nothing but the dtype, the device or the shape of the argument at this place.
_LOOKS_AT = {
    torch.Tensor.type_as: 1,
    torch.Tensor.to: 1,
    **dict.fromkeys((torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty, torch.Tensor.new_full), 0),
    **dict.fromkeys((torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like), 0),
}


@dataclass(frozen=True)
class NormUses:
    """What uses the outputs of norms.

    Attributes:
        linears: norm FQN -> FQNs of the linears that multiply its output, in order.
        others: norm FQN -> everything else that uses its output, sorted.
        calls: FQN of a norm or linear -> how often the forward pass calls it.
        unfollowed: modules that cannot run on the meta device, and why.
        overwritten: FQNs of the norms whose input is written to in place after they have read it. Compiled, PyTorch
            would give the linears of an MXNorm the new values in their backward, without an error.
        keywords: module FQN -> a keyword that the forward pass calls it with, other than "x", as our layers call it.
        outside: linear FQN -> a function that other code computes with its weight. Such code does so after a swap, too.
    """

    linears: Mapping[str, tuple[str, ...]]
    others: Mapping[str, tuple[str, ...]]
    calls: Mapping[str, int]
    unfollowed: tuple[str, ...]
    overwritten: frozenset[str] = frozenset()
    keywords: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)


class _Watcher(TorchFunctionMode):
    """Records the uses of norms' outputs while a forward pass runs.

    Attributes:
        running: FQN of the innermost module whose forward is running.
        where: the device of the forward pass and, if it was not given by the user, its input.
    """

    def __init__(self, norms: Collection[str], linear_of: Mapping[int, str], where: str):
        super().__init__()
        self.where = where
        self.linears: dict[str, list[str]] = {fqn: [] for fqn in norms}
        self.others: dict[str, set[str]] = {fqn: set() for fqn in norms}
        self.calls = dict.fromkeys([*norms, *linear_of.values()], 0)
        self.unfollowed: list[str] = []
        self.keywords: dict[str, str] = {}
        self.outside: dict[str, str] = {}
        self.running: str | None = None
        self._linear_of = linear_of
        # Outputs are kept alive: Python gives the id of a collected tensor to another one.
        self._outputs: dict[int, tuple[str, torch.Tensor]] = {}
        self._inputs: list[tuple[str, torch.Tensor, int | None]] = []

    def uses(self) -> NormUses:
        return NormUses(
            linears={fqn: tuple(linears) for fqn, linears in self.linears.items()},
            others={fqn: tuple(sorted(others)) for fqn, others in self.others.items()},
            calls=self.calls,
            unfollowed=tuple(self.unfollowed),
            overwritten=frozenset(norm for norm, x, writes in self._inputs if version(x) != writes),
            keywords=self.keywords,
            outside=self.outside,
        )

    def track(self, norm: str, inputs, output: torch.Tensor) -> None:
        self.calls[norm] += 1
        self._outputs[id(output)] = (norm, output)
        with torch._C.DisableTorchFunction():  # looking at the versions is no use of another norm's output
            self._inputs += [(norm, x, version(x)) for x in tree_flatten(inputs)[0] if isinstance(x, torch.Tensor)]

    def note_other_use(self, values, user: str) -> None:
        for norm in self._norms_of(values):
            self.others[norm].add(user)

    def note_unfollowed(self, module: str, values, error: Exception) -> None:
        """Give up on the norms in a module that failed half-way, and on the norms whose outputs it was given."""
        reason = f"{module}, which fails {self.where} ({type(error).__name__}: {first_line(error)})"
        self.unfollowed.append(reason)
        self.note_other_use(values, reason)
        for norm, others in self.others.items():
            if norm.startswith(module + "."):
                others.add(reason)

    def _norms_of(self, values) -> list[str]:
        return [self._outputs[id(v)][0] for v in tree_flatten(values)[0] if id(v) in self._outputs]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            linear = self._linear_of.get(id(args[1] if len(args) > 1 else kwargs["weight"]))
            if linear is not None:
                self.calls[linear] += 1
                if linear == self.running:
                    for norm in self._norms_of(args[:1] or kwargs["input"]):
                        self.linears[norm].append(linear)
                    return func(*args, **kwargs)
        # A property's getter is called __get__; the property itself has the telling name.
        named = getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else func
        name = getattr(named, "__name__", str(func))
        if func not in _HARMLESS:
            self.note_other_use((args, kwargs), name)
        result = func(*args, **kwargs)
        # Looking at a weight's dtype or device is no computation.
        if any(isinstance(value, torch.Tensor) for value in tree_flatten(result)[0]):
            self._note_weights(func, args, kwargs, name)
        return result

    def _note_weights(self, func, args, kwargs, name: str) -> None:
        looked_at = _LOOKS_AT.get(func)
        used = [arg for place, arg in enumerate(args) if place != looked_at]
        for value in tree_flatten((used, kwargs))[0]:
            if (owner := self._linear_of.get(id(value))) is not None:
                self.outside[owner] = name


def watch(
    model: nn.Module,
    norms: Collection[str],
    linears: Collection[str],
    example_inputs: tuple | Mapping | None,
    hooks: Mapping[str, str],
    replaced_forwards: Collection[str],
) -> NormUses:
    """Run ``model`` once on the meta device and record the uses of the outputs of ``norms``.

    A module that cannot run there (data-dependent routing, kernels without a meta version) is skipped: the pass goes on
    with an empty tensor shaped like its first argument, and everything the module touched counts as another use.

    Args:
        model: a structural copy on the meta device, whose ``forward`` methods this function replaces.
        norms: FQNs of the norms to watch.
        linears: FQNs of the linears that may become MXNormLinear: plain ones that share no weight.
        example_inputs: arguments of the model, in their order or by name; None stands for one row of 32 token ids.
        hooks: FQN of every module whose hooks see values in the original -> what hooks it has. The copy has none; they
            use what goes into the module and what it returns.
        replaced_forwards: FQNs of modules whose forward is a plain function in the original, which cannot be followed.

    Raises:
        ConfigError: if the model's own forward fails or was replaced.
    """
    if "" in replaced_forwards:
        raise ConfigError(
            f"converter = 'mxnorm' cannot follow the forward of this {type(model).__name__}: a function was set in its "
            "place; set it after conversion"
        )
    where = "on the meta device"
    if example_inputs is None:
        example_inputs = (torch.zeros(1, 32, dtype=torch.long),)
        where += " with 32 token ids as example_inputs"
    by_name = dict(example_inputs) if isinstance(example_inputs, Mapping) else {}
    in_order = () if isinstance(example_inputs, Mapping) else example_inputs
    watcher = _Watcher(norms, {id(model.get_submodule(fqn).weight): fqn for fqn in linears}, where)
    for fqn, module in model.named_modules():
        if fqn:
            forward = _not_followed if fqn in replaced_forwards else module.forward
            vars(module)["forward"] = _watched(watcher, fqn, forward, hooks.get(fqn))
    try:
        with (
            _ONE_AT_A_TIME,
            torch.inference_mode(False),  # writes are not counted in inference mode
            torch.no_grad(),
            torch.random.fork_rng(devices=()),  # a model that skips layers at random draws on the CPU
            without_global_hooks(),
            without_triton_launches(),
            with_autocast_of_meta(),
            torch.compiler.set_stance("force_eager"),  # Inductor fails on meta tensors, as in create_block_mask
            with_empty_flex_attention(),
            watcher,
        ):
            in_order, by_name = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (in_order, by_name))
            watcher.note_other_use(model(*in_order, **by_name), "the caller of the model")
    except Exception as error:
        raise ConfigError(
            f"converter = 'mxnorm' cannot see which linears the norms of this {type(model).__name__} feed: one forward "
            f"pass {where} failed with {type(error).__name__}: {error}"
            + (f"; before that it did not follow {'; '.join(watcher.unfollowed)}" if watcher.unfollowed else "")
            + ("; leave out masks and other tensors whose values the model looks at" if by_name else "")
        ) from error
    return watcher.uses()


def first_line(error: Exception) -> str:
    """The first line of the message. torch.compile names the backend there, and the cause in the next one."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{first} {others[0]}" if others and first.endswith("raised:") else first


def _not_followed(*args, **kwargs):
    raise RuntimeError("a function was set in the place of its forward")


def _watched(watcher: _Watcher, fqn: str, forward, hooks: str | None):
    """``forward`` of the module ``fqn``, which tells the watcher what it returns, that it runs, and what hooks see."""

    def run(*args, **kwargs):
        if others := kwargs.keys() - {"x"}:
            watcher.keywords[fqn] = min(others)
        caller, watcher.running = watcher.running, fqn
        try:
            output = forward(*args, **kwargs)
        except Exception as error:
            tensors_in = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
            if not tensors_in:
                raise
            watcher.note_unfollowed(fqn, (args, kwargs), error)
            with torch._C.DisableTorchFunction():  # looking at the dtype is no use of a norm's output
                return torch.empty(tensors_in[0].shape, dtype=tensors_in[0].dtype, device="meta")
        finally:
            watcher.running = caller
        if hooks:
            watcher.note_other_use((args, kwargs, output), f"{hooks} of {fqn}")
        if fqn in watcher.linears:
            watcher.track(fqn, (args, kwargs), output)
        return output

    return run
