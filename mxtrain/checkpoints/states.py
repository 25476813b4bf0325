"""States in a checkpoint beside the weights, where TorchTitan 0.2.2 saves or restores them wrongly.

It saves no states of random number generators, and the token count of one rank only. It restores learning rate, betas
and so on from the checkpoint, so a changed setting would have no effect.
"""

import logging
import pickle
import random

import numpy as np
import torch

from mxtrain.checkpoints.storage import unpickle
from mxtrain.ranks import gather, is_first


class _Array:
    """Stands for an array and its dtype. NumPy's own can be made to take any memory for objects, which run code."""

    def __init__(self, *args):
        pass

    def __setstate__(self, state: tuple) -> None:
        self.data = state[-1]


_ARRAYS = dict.fromkeys(("numpy.ndarray", "numpy.dtype"), _Array)
_ARRAYS |= {f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")}  # NumPy 1 and 2


class RandomState:
    """The generators of Python, NumPy and PyTorch (CPU and current GPU) on all ranks, as part of a checkpoint.

    A run that resumes with as many processes restores them. With another number of processes there is no state that
    fits, and the generators stay as they were seeded.
    """

    def state_dict(self) -> dict:
        """Return the states of all ranks, the same value on each. All ranks must call it at about the same time."""
        # One value instead of a key per rank: with more ranks than before, DCP would look for keys that do not exist.
        return {"ranks": pickle.dumps(gather(_states()), protocol=4)}  # with the names in _ARRAYS

    def load_state_dict(self, state: dict) -> None:
        ranks = unpickle(state["ranks"], "the states of the random number generators", _ARRAYS)
        processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if len(ranks) == processes:
            _restore(ranks[torch.distributed.get_rank() if processes > 1 else 0])
        elif is_first():
            logging.getLogger(__name__).info(
                f"The checkpoint has the states of the random number generators of {len(ranks)} process(es), and this "
                f"run has {processes}: the generators start from the seed"
            )


def _states() -> dict:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state().numpy(),
        "cuda": torch.cuda.get_rng_state().numpy() if torch.cuda.is_available() else None,
    }


def _restore(states: dict) -> None:
    random.setstate(states["python"])
    kind, key, *rest = states["numpy"]
    np.random.set_state((kind, np.frombuffer(key.data, np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(states["cpu"].data), dtype=torch.uint8))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"].data), dtype=torch.uint8))


class TokenCount:
    """Converts between the tokens that one rank has seen and the tokens that all ranks have seen.

    So the count goes on when the number of ranks changes. TorchTitan counts on every rank, adds up the counts of all
    ``ranks`` for its metrics, and saves the count of one rank. All ranks see as many tokens in a step, so one rank's
    count gives the count of all.
    """

    def __init__(self, ranks: int, rank: int):
        self._ranks = ranks
        self._rank = rank
        self._loaded = self._share = 0

    def of_all_ranks(self, own: int) -> int:
        """Return the tokens that all ranks have seen, if this rank has seen ``own``."""
        return self._loaded + (own - self._share) * self._ranks

    def share(self, of_all_ranks: int) -> int:
        """Return this rank's share of the tokens that earlier ranks have seen. The shares add up to all of them."""
        own, rest = divmod(of_all_ranks, self._ranks)
        self._loaded, self._share = of_all_ranks, own + (self._rank < rest)
        return self._share


def apply_settings(optimizers, lr_schedulers) -> tuple[float, float]:
    """Set what the job config decides in every parameter group. Call after a checkpoint was loaded.

    Values that are the same as in the checkpoint stay the same to the last bit. Every optimizer has a ``LambdaLR``.
    Returns the learning rate of the next step as the checkpoint has it, and as the settings have it.
    """
    first = optimizers.optimizers[0].param_groups[0]
    kept = float(first["lr"])
    for optimizer, scheduler in zip(optimizers.optimizers, lr_schedulers.schedulers, strict=True):
        # ``defaults`` are the arguments of this process's optimizer. Loading a checkpoint adds a name to them at most.
        defaults, base = optimizer.defaults, optimizer.defaults["lr"]
        for group, schedule in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
            group.update({name: defaults[name] for name in defaults if name in group})
            group["initial_lr"] = base
            group["lr"] = base * schedule(scheduler.last_epoch)  # as LambdaLR computes it
            if group.get("fused"):  # the step counts must be where the parameters are; others keep them on the CPU
                for parameter in group["params"]:
                    if "step" in (state := optimizer.state.get(parameter, {})):
                        state["step"] = state["step"].to(parameter.device)
        rates = [group["lr"] for group in optimizer.param_groups]
        # "_last_lr" is what TorchTitan logs.
        scheduler.load_state_dict(scheduler.state_dict() | {"base_lrs": [base] * len(rates), "_last_lr": rates})
    return kept, float(first["lr"])
