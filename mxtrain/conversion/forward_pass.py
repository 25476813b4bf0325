"""What one forward pass of a model shows: which linears take the output of each norm, and what else uses it.

A copy of the model runs with PyTorch's fake tensors, which have shapes and no data. The pass therefore costs no
arithmetic, and works for a model of any size before its weights exist. Every module of the copy reports its calls, and
a ``TorchFunctionMode`` sees every other function that takes a norm's output.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from mxtrain.errors import ConfigError
from mxtrain.launch.pytorch import DisableTorchFunction, fake_tensor_mode, tree_leaves, tree_map_only
from mxtrain.nn.normed_input import LOOKS
from mxtrain.nn.three_gemms import version

# Functions that a model may call on an MXNorm's result besides multiplying it. A mode gets a method as it is, and the
# getter of an attribute.
_LOOKS = [getattr(torch.Tensor, name) for name in LOOKS]
_HARMLESS = {*_LOOKS, *(look.__get__ for look in _LOOKS)}


@dataclass
class Uses:
    """What uses the outputs of norms.

    Attributes:
        linears: norm FQN -> FQNs of the linears that multiply its output, or a part of it, in order.
        others: norm FQN -> everything else that uses its output.
        calls: FQN of a norm or linear -> how often it is called.
        unfollowed: modules that cannot run without data, and why.
        overwritten: FQNs of the norms whose input is written to in place after they have read it. Compiled, PyTorch
            would give the linears of an MXNorm the new values in their backward, without an error.
        mixtures: norm FQN -> FQNs of the known mixtures of experts that it feeds. They do not run.
    """

    linears: dict[str, list[str]]
    others: dict[str, set[str]]
    calls: dict[str, int]
    unfollowed: list[str] = field(default_factory=list)
    overwritten: set[str] = field(default_factory=set)
    mixtures: dict[str, list[str]] = field(default_factory=dict)


def watch(
    modules: Mapping[str, nn.Module],
    norms: Collection[str],
    linears: Collection[str],
    mixtures: Collection[str],
    example_inputs: tuple | Mapping | None,
) -> Uses:
    """Run a copy of a model once and record the uses of the outputs of ``norms``.

    A module that cannot run without data (data-dependent routing, kernels without a meta version) is skipped: the pass
    goes on with an empty tensor shaped like its first argument, and everything the module touched counts as another
    use.

    Args:
        modules: every module of the model by FQN, the model itself ("") first.
        norms: FQNs of the norms to watch.
        linears: FQNs of the linears that may become MXNormLinear: plain ones that share no weight.
        mixtures: FQNs of the mixtures of experts whose use of their input is known.
        example_inputs: arguments of the model, in their order or by name; None stands for one row of 32 token ids.
    """
    where = "without data"
    if example_inputs is None:
        example_inputs = (torch.zeros(1, 32, dtype=torch.long),)
        where += " with 32 token ids as example_inputs"
    by_name = dict(example_inputs) if isinstance(example_inputs, Mapping) else {}
    in_order = () if isinstance(example_inputs, Mapping) else tuple(example_inputs)
    fakes = fake_tensor_mode()
    model = _copy_of(modules[""], fakes)
    copies = dict(zip(modules, model.modules(), strict=True))
    watcher = _Watcher(copies, norms, linears, mixtures, where)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings(), fakes, watcher:
            warnings.simplefilter("ignore")  # of flex_attention outside of torch.compile
            in_order, by_name = tree_map_only(torch.Tensor, _empty, (in_order, by_name))
            watcher.note_other_use(model(*in_order, **by_name), "the caller of the model")
    except Exception as error:
        message = (
            f"converter = 'mxnorm' cannot find the linears that the norms of this {type(model).__name__} feed, because "
            f"one forward pass {where} failed with {type(error).__name__}: {error}"
        )
        if unfollowed := watcher.uses.unfollowed:
            message += f"; before that, it could not follow {'; '.join(unfollowed)}"
        if by_name:
            message += "; leave out masks and other tensors whose values the model looks at"
        raise ConfigError(message) from error
    watcher.uses.overwritten |= {norm for norm, x, writes in watcher.inputs if version(x) != writes}
    return watcher.uses


class _Watcher(TorchFunctionMode):
    """Records the uses of norms' outputs while a forward pass of ``modules`` runs.

    Attributes:
        running: FQN of the innermost module whose forward is running, "" for the model itself.
        where: how the pass runs and, if it was not given by the user, its input.
        inputs: norm FQN, input, and the number of writes to it so far, of every call of a norm.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        norms: Collection[str],
        linears: Collection[str],
        mixtures: Collection[str],
        where: str,
    ):
        super().__init__()
        self.uses = Uses(
            {fqn: [] for fqn in norms}, {fqn: set() for fqn in norms}, dict.fromkeys([*norms, *linears], 0)
        )
        self.running, self.where = "", where
        self.inputs: list[tuple[str, torch.Tensor, int | None]] = []
        self._modules, self._linears, self._mixtures = modules, {*linears}, mixtures
        # Outputs are kept alive: Python gives the id of a collected tensor to another one.
        self._outputs: dict[int, tuple[str, torch.Tensor]] = {}
        self._parts: dict[int, tuple[str, torch.Tensor]] = {}  # of outputs
        for fqn, module in modules.items():
            module.forward = self._watched(fqn, module.forward)

    def _watched(self, fqn: str, forward: Callable) -> Callable:
        """``forward`` of the module ``fqn``, with a report of what it takes and returns."""

        def run(*args, **kwargs):
            caller, self.running = self.running, fqn
            given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            norms = self._norms_of(given)
            try:
                if fqn in self._mixtures:
                    for norm in norms:
                        self.uses.mixtures.setdefault(norm, []).append(fqn)
                    return self._like(given[0])
                if fqn in self.uses.calls:
                    self.uses.calls[fqn] += 1
                if isinstance(self._modules[fqn], nn.Linear):
                    for norm in (*norms, *(self._parts[id(x)][0] for x in given if id(x) in self._parts)):
                        self.uses.linears[norm].append(fqn)
                output = forward(*args, **kwargs)
            except Exception as error:
                if not given or not fqn:
                    raise
                self._note_unfollowed(fqn, norms, error)
                return self._like(given[0])
            finally:
                self.running = caller
            if fqn in self.uses.linears:
                self._outputs[id(output)] = (fqn, output)
                with DisableTorchFunction():  # looking at the versions is no use of another norm's output
                    self.inputs += [(fqn, x, version(x)) for x in given]
            return output

        return run

    def note_other_use(self, values, user: str) -> None:
        for norm in self._norms_of(values):
            self.uses.others[norm].add(user)

    def _note_unfollowed(self, module: str, norms: list[str], error: Exception) -> None:
        """Give up on the norms in a module that failed half-way, and on the norms whose outputs it was given."""
        message = str(error).strip().partition("\n")[0]
        reason = f"{module}, which fails {self.where} ({type(error).__name__}: {message})"
        self.uses.unfollowed.append(reason)
        for norm, others in self.uses.others.items():
            if norm in norms or norm.startswith(module + "."):
                others.add(reason)

    def _norms_of(self, values) -> list[str]:
        return [self._outputs[id(value)][0] for value in tree_leaves(values) if id(value) in self._outputs]

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        with DisableTorchFunction():  # looking at the dtype is no use of a norm's output
            return _empty(tensor)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        keeps_dtype = func is torch.Tensor.to and len(args) == 2 and args[1] is args[0].dtype and not kwargs
        if func not in _HARMLESS and not keeps_dtype and self.running not in self._linears:
            # A property's getter is called __get__; the property itself has the telling name.
            named = getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else func
            # Many layers have modules of the same class.
            user = type(self._modules[self.running]).__name__
            self.note_other_use((args, kwargs), f"{getattr(named, '__name__', str(func)).strip('_')} in {user}")
        result = func(*args, **kwargs)
        if func is torch.Tensor.__getitem__:  # models of transformers give their head the last tokens
            self._parts |= {id(result): (norm, result) for norm in self._norms_of(args[0])}
        return result


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype, on the CPU.

    The model may be on the meta device, which PyTorch's autocast and ``flex_attention`` refuse.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _copy_of(model: nn.Module, fakes: AbstractContextManager) -> nn.Module:
    """Copy a model with everything in it but its hooks, which belong to the user; its tensors become fake ones."""
    memo = {}
    for module in model.modules():
        memo |= {id(hooks): type(hooks)() for name, hooks in vars(module).items() if name.endswith("_hooks")}
        for tensor in tree_leaves(list(vars(module).values())):
            if isinstance(tensor, torch.Tensor):
                with fakes:
                    new = _empty(tensor)
                memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return copy.deepcopy(model, memo)
