"""Keeps the states of the random number generators in checkpoints, which TorchTitan 0.2.2 does not."""

import logging
import pickle
import random

import numpy as np
import torch

from mxtrain.checkpoints.reader import unpickle
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
