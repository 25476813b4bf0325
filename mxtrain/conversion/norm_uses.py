"""See what becomes of the outputs of a model's norms, by watching one forward pass on the meta device.

Meta tensors have shapes and no data, so the pass costs no arithmetic and works for a model of any size, before its
weights exist. It is followed through the module tree and through every PyTorch function.
"""

from collections.abc import Collection, Iterable

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from mxtrain.errors import ConfigError

# What a module may ask of a NormedInput besides multiplying it.
_HARMLESS = {torch.Tensor.shape.__get__}


def shared_parameters(model: nn.Module) -> set[int]:
    """ids of parameters that more than one module owns."""
    seen, shared = set(), set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


class NormUses(TorchFunctionMode):
    """Records what happens to the outputs of norms during one forward pass.

    Attributes:
        linears: norm FQN -> FQNs of the nn.Linear modules that multiplied its output, in order.
        others: norm FQN -> what else used its output.
        calls: linear FQN -> how often it was called at all.
        unfollowed: modules that could not be run, and why.
        running: FQN of the innermost module whose forward is running.
    """

    def __init__(self, norms: Iterable[str], weights: dict[int, str]):
        super().__init__()
        self.linears = {fqn: [] for fqn in norms}
        self.others = {fqn: set() for fqn in norms}
        self.calls = dict.fromkeys(weights.values(), 0)
        self.unfollowed: list[str] = []
        self.running: str | None = None
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
        # A weight multiplied outside its module's forward would still be after a swap, and not by the swapped module.
        if linear is not None and linear == self.running:
            for norm in self._norms_of(args[:1] or kwargs["input"]):
                self.linears[norm].append(linear)
        elif func not in _HARMLESS:
            # A property's getter is called __get__; the property itself has the telling name.
            named = getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else func
            self.note_other_use((args, kwargs), getattr(named, "__name__", str(func)))
        return func(*args, **kwargs)


def watch_norms(model: nn.Module, norms: Collection[str], example_inputs: tuple | None) -> NormUses:
    """Run ``model`` once on the meta device and record the uses of the outputs of the modules named ``norms``.

    A module that cannot run there (data-dependent routing, kernels without a meta version) is stepped over as if it
    returned something shaped like its first argument, and whatever it touched counts as used in an unknown way.
    """
    if example_inputs is None:
        example_inputs = (torch.zeros(1, 32, dtype=torch.long),)
    inputs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), example_inputs)
    shared = shared_parameters(model)
    tensors = {name: t.to("meta") for name, t in (*model.named_parameters(), *model.named_buffers())}
    weights = {
        id(tensors[f"{fqn}.weight"]): fqn
        for fqn, module in model.named_modules()
        if type(module) is nn.Linear and id(module.weight) not in shared
    }
    uses = NormUses(norms, weights)

    def watched(fqn: str, module: nn.Module):
        forward = module.forward

        def run(*args, **kwargs):
            caller, uses.running = uses.running, fqn
            try:
                output = forward(*args, **kwargs)
            except Exception as error:
                tensors_in = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
                if not tensors_in:
                    raise
                uses.note_unfollowed(fqn, (args, kwargs), error)
                return torch.empty(tensors_in[0].shape, dtype=tensors_in[0].dtype, device="meta")
            finally:
                uses.running = caller
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
