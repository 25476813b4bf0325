"""What one forward pass of a model shows: which linears take the output of each norm, and what else uses it.

A copy of the model runs with PyTorch's fake tensors, which have shapes and no data. The pass therefore costs no
arithmetic, and works for a model of any size before its weights exist. It is followed through the module tree and
through every PyTorch function. Nothing that the copy does reaches the model.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from types import FunctionType
from unittest import mock

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import KernelInterface

from mxtrain.errors import ConfigError
from mxtrain.launch.pytorch import (
    DisableTorchFunction,
    FakeTensorMode,
    detect_fake_mode,
    tree_leaves,
    tree_map_only,
    unset_fake_temporarily,
)
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.normed_input import LOOKS
from mxtrain.nn.three_gemms import QuantizedLayer, QuantizedLinear, version

# Functions that a model may call on an MXNorm's result besides multiplying it. The watcher gets a method as it is, and
# the getter of an attribute.
_LOOKS = [getattr(torch.Tensor, name) for name in LOOKS]
_HARMLESS = {*_LOOKS, *(look.__get__ for look in _LOOKS)}


@dataclass
class Uses:
    """What uses the outputs of norms and the weights of linears.

    Attributes:
        linears: norm FQN -> FQNs of the linears that multiply its output, in order.
        others: norm FQN -> everything else that uses its output.
        calls: FQN of a norm or linear -> how often the forward pass calls it.
        unfollowed: modules that cannot run without data, and why.
        overwritten: FQNs of the norms whose input is written to in place after they have read it. Compiled, PyTorch
            would give the linears of an MXNorm the new values in their backward, without an error.
        mixtures: norm FQN -> FQNs of the known mixtures of experts that it feeds. Their parts see another tensor here.
        outside: linear FQN -> a function that other code computes with its weight. Such code does so after a swap, too.
    """

    linears: dict[str, list[str]]
    others: dict[str, set[str]]
    calls: dict[str, int]
    unfollowed: list[str] = field(default_factory=list)
    overwritten: set[str] = field(default_factory=set)
    outside: dict[str, str] = field(default_factory=dict)
    mixtures: dict[str, list[str]] = field(default_factory=dict)


def watch(
    model: nn.Module,
    norms: Collection[str],
    linears: Collection[str],
    mixtures: Collection[str],
    example_inputs: tuple | Mapping | None,
) -> Uses:
    """Run a copy of ``model`` once and record the uses of the outputs of ``norms``.

    A module that cannot run without data (data-dependent routing, kernels without a meta version) is skipped: the pass
    goes on with an empty tensor shaped like its first argument, and everything the module touched counts as another
    use.

    Args:
        norms: FQNs of the norms to watch.
        linears: FQNs of the linears that may become MXNormLinear: plain ones that share no weight.
        mixtures: FQNs of the mixtures of experts whose use of their input is known.
        example_inputs: arguments of the model, in their order or by name; None stands for one row of 32 token ids.

    Raises:
        ConfigError: if the model cannot be copied, or if its own forward fails or was replaced.
    """
    where = "without data"
    if example_inputs is None:
        example_inputs = (torch.zeros(1, 32, dtype=torch.long),)
        where += " with 32 token ids as example_inputs"
    by_name = dict(example_inputs) if isinstance(example_inputs, Mapping) else {}
    in_order = () if isinstance(example_inputs, Mapping) else tuple(example_inputs)
    # Tensors of two modes do not mix: a model may be converted while the user's own is on.
    fakes = detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with fakes:
            return _empty(tensor)

    model_copy = copy_of(model, fake)
    owners = {id(model_copy.get_submodule(fqn).weight): fqn for fqn in linears}
    watcher = _Watcher(model, norms, owners, mixtures, where)
    for (fqn, original), module in zip(model.named_modules(), model_copy.modules(), strict=True):
        # Layers of an earlier conversion do not run without data; the plain ones that they replaced do.
        if isinstance(module, MXNorm | QuantizedLinear):
            module.__class__ = nn.RMSNorm if isinstance(module, MXNorm) else nn.Linear
        elif isinstance(module, QuantizedLayer):  # experts
            module.__class__ = type(module).__bases__[1]
        hooks = [hook for hook in hooks_of(original) if "forward" in hook or "backward" in hook]
        # Norms and linears with hooks stay for their own reasons. The result of the model has no other users.
        seen_by = hooks if fqn and fqn not in norms and not isinstance(original, nn.Linear) else ()
        vars(module)["forward"] = _watched(watcher, fqn, module.forward, " and ".join(seen_by))
    # A kernel takes the null pointer of a fake tensor for an address. On a GPU this is an illegal memory access, after
    # which the process cannot use the GPU any more.
    no_launch = RuntimeError("it launches a Triton kernel, which needs data")
    try:
        with (
            torch.no_grad(),
            mock.patch.object(KernelInterface, "__getitem__", side_effect=no_launch),
            mock.patch.object(getLogger("torch._subclasses.fake_tensor"), "disabled", True),  # it shows every error
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
            fakes,
            watcher,
        ):
            warnings.simplefilter("ignore")  # of flex_attention outside of torch.compile
            in_order, by_name = tree_map_only(torch.Tensor, fake, (in_order, by_name))
            watcher.note_other_use(model_copy(*in_order, **by_name), "the caller of the model")
    except Exception as error:
        message = (
            f"converter = 'mxnorm' cannot see which linears the norms of this {type(model).__name__} feed: one forward "
            f"pass {where} failed with {type(error).__name__}: {error}"
        )
        if unfollowed := watcher.uses.unfollowed:
            message += f"; before that it did not follow {'; '.join(unfollowed)}"
        if by_name:
            message += "; leave out masks and other tensors whose values the model looks at"
        raise ConfigError(message) from error
    watcher.uses.overwritten |= {norm for norm, x, writes in watcher.inputs if version(x) != writes}
    return watcher.uses


class _Watcher(TorchFunctionMode):
    """Records the uses of norms' outputs while a forward pass runs.

    Attributes:
        running: FQN of the innermost module whose forward is running, "" for the model itself.
        where: how the pass runs and, if it was not given by the user, its input.
        inputs: norm FQN, input, and the number of writes to it so far, of every call of a norm.
    """

    def __init__(
        self,
        model: nn.Module,
        norms: Collection[str],
        linear_of: Mapping[int, str],
        mixtures: Collection[str],
        where: str,
    ):
        super().__init__()
        self.where = where
        calls = dict.fromkeys([*norms, *linear_of.values()], 0)
        self.uses = Uses({fqn: [] for fqn in norms}, {fqn: set() for fqn in norms}, calls)
        self.running = ""
        self.inputs: list[tuple[str, torch.Tensor, int | None]] = []
        self._model, self._linear_of, self._mixtures = model, linear_of, mixtures
        # Outputs are kept alive: Python gives the id of a collected tensor to another one.
        self._outputs: dict[int, tuple[str, torch.Tensor]] = {}

    def track(self, norm: str, inputs, output: torch.Tensor) -> None:
        self.uses.calls[norm] += 1
        self._outputs[id(output)] = (norm, output)
        with DisableTorchFunction():  # looking at the versions is no use of another norm's output
            self.inputs += [(norm, x, version(x)) for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]

    def note_mixture(self, fqn: str, args: tuple) -> tuple:
        """If ``fqn`` is a known mixture that takes a norm's output, note it, and return other arguments."""
        if fqn not in self._mixtures or not (norms := self._norms_of(args)):
            return args
        for norm in norms:
            self.uses.mixtures.setdefault(norm, []).append(fqn)
        with DisableTorchFunction():
            return tuple(_empty(value) if isinstance(value, torch.Tensor) else value for value in args)

    def note_other_use(self, values, user: str) -> None:
        for norm in self._norms_of(values):
            self.uses.others[norm].add(user)

    def note_unfollowed(self, module: str, values, error: Exception) -> None:
        """Give up on the norms in a module that failed half-way, and on the norms whose outputs it was given."""
        with unset_fake_temporarily():  # a message may show values
            reason = f"{module}, which fails {self.where} ({type(error).__name__}: {first_line(error)})"
        self.uses.unfollowed.append(reason)
        self.note_other_use(values, reason)
        for norm, others in self.uses.others.items():
            if norm.startswith(module + "."):
                others.add(reason)

    def _norms_of(self, values) -> list[str]:
        return [self._outputs[id(value)][0] for value in tree_leaves(values) if id(value) in self._outputs]

    def _runner(self) -> str:
        """What runs now: the name of a linear; the class of any other module, for many layers have the same one."""
        module = self._model.get_submodule(self.running)
        return self.running if isinstance(module, nn.Linear) else type(module).__name__

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            linear = self._linear_of.get(id(args[1] if len(args) > 1 else kwargs["weight"]))
            if linear is not None:
                self.uses.calls[linear] += 1
                if linear == self.running:
                    for norm in self._norms_of(args[:1] or kwargs["input"]):
                        self.uses.linears[norm].append(linear)
                    return func(*args, **kwargs)
        # A property's getter is called __get__; the property itself has the telling name.
        named = getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else func
        name = getattr(named, "__name__", str(func))
        if func not in _HARMLESS:
            self.note_other_use((args, kwargs), f"{name} in {self._runner()}")
        if func is torch.histc:  # routers count tokens; PyTorch counts integers on GPUs only
            args = (args[0].float(), *args[1:])
        result = func(*args, **kwargs)
        # Looking at a weight's dtype or device is no computation.
        if any(isinstance(value, torch.Tensor) for value in tree_leaves(result)):
            for value in tree_leaves((args, kwargs)):
                if (owner := self._linear_of.get(id(value))) is not None:
                    self.uses.outside[owner] = name
        return result


def _watched(watcher: _Watcher, fqn: str, forward, hooks: str):
    """``forward`` of the module ``fqn``, which tells the watcher what it returns, that it runs, and what hooks see."""

    def run(*args, **kwargs):
        caller, watcher.running = watcher.running, fqn
        try:
            if isinstance(forward, FunctionType):  # it may refer to any object, the original model among them
                raise RuntimeError("a function was set in the place of its forward: set it after conversion")
            output = forward(*watcher.note_mixture(fqn, args), **kwargs)
        except Exception as error:
            given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            if not given or not fqn:
                raise
            watcher.note_unfollowed(fqn, (args, kwargs), error)
            with DisableTorchFunction():  # looking at the dtype is no use of a norm's output
                return _empty(given[0])
        finally:
            watcher.running = caller
        if hooks:
            watcher.note_other_use((args, kwargs, output), f"{hooks} of {fqn}")
        if fqn in watcher.uses.linears:
            watcher.track(fqn, (args, kwargs), output)
        return output

    return run


def first_line(error: Exception) -> str:
    """The first line of the message."""
    return str(error).strip().partition("\n")[0]


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype, on the CPU.

    The model may be on the meta device, which PyTorch's autocast and ``flex_attention`` refuse.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def copy_of(module: nn.Module, new_tensor: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Copy a module with everything in it but its hooks; ``new_tensor`` gives its tensors, in lists and dicts, too.

    Modules and parameters with several names have the same names in the copy. Hooks belong to the user, and may keep
    what they see.

    Raises:
        ConfigError: for a module with attributes that Python cannot copy.
    """
    memo = {}
    for part in module.modules():
        memo |= {id(table): type(table)() for table in _hook_tables(part).values()}
        for tensor in tree_leaves(list(vars(part).values())):
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(new_tensor(tensor), tensor.requires_grad)
            elif isinstance(tensor, torch.Tensor):
                memo[id(tensor)] = new_tensor(tensor)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # any attribute may raise anything
        raise ConfigError(
            f"this {type(module).__name__} cannot be copied, and conversion looks at a copy: "
            f"{type(error).__name__}: {error}"
        ) from error


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that a module has: "a forward hook", "a state dict pre hook", ..."""
    return ["a " + name[1:-1].replace("_", " ") for name, table in _hook_tables(module).items() if table]


def _hook_tables(module: nn.Module) -> dict[str, dict]:
    attributes = vars(module).items()
    return {name: table for name, table in attributes if name.endswith("_hooks") and isinstance(table, dict)}
