"""Initial weights that depend on the seed and the parameters' names only, on no layout of processes.

A trainer calls ``init_weights`` on the parallelized model, whose parameters are shards. Random numbers that a rank
draws for its shard, from one generator for all parameters, differ with the number of ranks. Here every random
operation of ``init_weights`` fills the full tensor, with a generator of its own, and the rank keeps its shard.

The model's own code still decides on the distribution: only the source of its random numbers changes.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from mxtrain.launch.pytorch import TorchDispatchMode, tree_leaves
from mxtrain.rng.seeds import weight_seed

# Segments that activation checkpointing and torch.compile add to names.
WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


def plain_name(fqn: str) -> str:
    """Return the FQN of a parameter without the names of modules that wrap others."""
    return ".".join(segment for segment in fqn.split(".") if segment not in WRAPPERS)


def shared_seed(parallel_dims, debug_seed: int | None) -> int:
    """Return ``debug.seed`` or, if it is unset, the seed that TorchTitan has given to PyTorch on all ranks.

    TorchTitan adds the number of the pipeline stage to its seed. It is subtracted here.
    """
    if debug_seed is not None:
        return debug_seed
    stages = parallel_dims.get_optional_mesh("pp")
    return (torch.initial_seed() - (stages.get_local_rank() if stages is not None else 0)) % 2**64


def draw_by_name(
    model: torch.nn.Module, seed: int, device: torch.device, renamed: Callable[[str], str] = plain_name
) -> None:
    """Make ``init_weights`` of a parallelized model, or of a stage's part, draw the same weights on every layout.

    Arguments as for ``DrawsByName``, with the same seed on all ranks.
    """
    init_weights = model.init_weights

    def init_weights_by_name(*args, **kwargs):
        with DrawsByName(model, seed, device, renamed):
            return init_weights(*args, **kwargs)

    model.init_weights = init_weights_by_name


class DrawsByName(TorchDispatchMode):
    """While active, random operations draw from generators that are seeded by the name of a parameter.

    The seed of a draw comes from ``seed``, the parameter's FQN and the number of earlier draws for this parameter. A
    tensor that is computed from a parameter counts as this parameter: TorchTitan draws into a float32 copy and casts.
    Draws into all other tensors are numbered together, and are the same on all ranks that do the same draws.

    An operation that fills a tensor in place (``normal_``, ``uniform_``, ...) fills the full tensor, of which a rank
    keeps its shard. So ranks need no communication, and memory for one full parameter at a time.

    The default generators keep their states.

    Args:
        device: where to draw. CPU and GPU generators differ, so this is the device that trains, also while the weights
            are on a CPU.
        renamed: FQN of a parameter in ``model`` -> the name that counts.
    """

    def __init__(
        self, model: torch.nn.Module, seed: int, device: torch.device, renamed: Callable[[str], str] = plain_name
    ):
        super().__init__()
        self._seed, self._device = seed, device
        self._draws, self._names = Counter(), WeakTensorKeyDictionary()
        for name, parameter in model.named_parameters():  # a shared parameter once, under its first name
            self._names[parameter] = renamed(name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        name = next((self._names[tensor] for tensor in tensors if tensor in self._names), "")
        if torch.Tag.nondeterministic_seeded not in func.tags or any(tensor.is_meta for tensor in tensors):
            result = func(*args, **kwargs)
        else:
            fills = func._schema.name.endswith("_") and len(tensors) == 1
            with _seeded(weight_seed(self._seed, name, self._draws[name])):
                result = self._fill(func, args, kwargs) if fills else func(*args, **kwargs)
            self._draws[name] += 1
        for tensor in tree_leaves(result) if name else ():
            if isinstance(tensor, torch.Tensor) and tensor not in self._names:
                self._names[tensor] = name
        return result

    def _fill(self, func, args: tuple, kwargs: dict) -> torch.Tensor:
        """Do ``func(tensor, *others)`` on a tensor of the full shape, and copy this rank's part into ``tensor``."""
        tensor, *others = args
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        func(full, *others, **kwargs)
        if isinstance(tensor, DTensor):
            (shard,) = tensor.__create_chunk_list__()  # the part that a checkpoint takes from this rank
            place = tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.sizes, strict=True))
            tensor.to_local().copy_(full[place])
        else:
            tensor.copy_(full)
        return tensor


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the default generators of the CPU and the current GPU for the time of one operation."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield
