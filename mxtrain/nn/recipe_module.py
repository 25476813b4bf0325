"""Modules with a recipe, and with random numbers of their own, derived from the job's seed and the module's name."""

from dataclasses import dataclass, field

import torch
import torch.nn as nn

from mxtrain.formats.format import FORMATS
from mxtrain.formats.recipe import LinearRecipe
from mxtrain.formats.schedule import LayerState, Timeline
from mxtrain.rng.rounding import draws_of_call, position_as_set, random_position
from mxtrain.rng.seeds import hadamard_signs, rounding_key, sign_mask

_LOADED = [fmt.ops for fmt in FORMATS.values()]  # with the layers, not while PyTorch traces one


@dataclass(frozen=True)
class _Numbers:
    """A layer's signs, packed, and its key. Copies of the layer share the tensors, by which calls are counted."""

    signs: int
    key: int
    tensors: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __deepcopy__(self, memo) -> "_Numbers":
        return self

    def __reduce__(self):
        return _Numbers, (self.signs, self.key)  # a pickle may be loaded where devices differ

    def on(self, device: torch.device) -> torch.Tensor:
        """Return signs and key, int64 [2]."""
        if device in self.tensors:
            return self.tensors[device]
        made = torch.tensor([self.signs, self.key], dtype=torch.int64, device="cpu").to(device)
        # Fake tensors, and those made in inference mode, are of no use later.
        return self.tensors.setdefault(device, made) if type(made) is torch.Tensor and not made.is_inference() else made


class RecipeModule(nn.Module):
    """A module with a recipe, which may change between steps: ``take`` sets it, and ``timeline`` says when.

    It has the signs of its Hadamard transform and the key of its stochastic rounding, from its first recipe on that
    needs them. These numbers are a plain tensor: ``to_empty`` would lose a buffer, and ``torch.compile`` would compile
    again for every Python number.
    """

    recipe: LinearRecipe
    timeline: Timeline | None = None
    """The recipes by step; None for one recipe throughout"""
    # int64 [2] on the device of the parameters (``_Numbers``).
    _seeds: torch.Tensor | None = None
    _fqn: str = ""

    @property
    def fqn(self) -> str:
        """The name that ``set_seed`` was given, for messages."""
        return self._fqn

    def set_seed(self, seed: int, fqn: str) -> None:
        """Take the numbers of layer ``fqn`` in a job with this seed.

        ``mxtrain.convert`` calls this. Before that, and in modules made by hand, the numbers are those of seed 0 and
        the empty name.
        """
        self._fqn = fqn
        self._numbers = _Numbers(sign_mask(hadamard_signs(seed, fqn)), rounding_key(seed, fqn))
        self._seeds = None
        self._make_seeds()

    def take(self, state: LayerState) -> None:
        """Compute with ``state`` from now on. ``torch.compile`` compiles once for every new state."""
        self.recipe = state.recipe
        self._make_seeds()

    def _make_seeds(self) -> None:
        if self._seeds is None and not self.recipe.needs_seeds:
            return
        device = next((p.device for p in self.parameters(recurse=False)), None)
        if device is None or device.type == "meta":
            device = torch.device("cpu") if self._seeds is None else self._seeds.device
        self._seeds = self._numbers.on(device)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._make_seeds()
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._make_seeds()

    def signs(self, device: torch.device) -> torch.Tensor | None:
        """Return the packed signs, int64 []; None if the recipe has no transform."""
        return self._seeds.to(device)[0] if self.recipe.needs_signs else None

    def draws(self, device: torch.device) -> torch.Tensor | None:
        """Return the key and position of this forward, int64 [4] (``mxtrain.rng.rounding.Draws``).

        None if the recipe rounds to nearest, or if there will be no backward.

        A backward must use the numbers of its own forward. Autograd functions therefore keep them as an attribute:
        activation checkpointing replaces saved tensors by those of a second forward.
        """
        if not (self.recipe.needs_draws and torch.is_grad_enabled()):
            return None
        position = position_as_set(device.type)
        if position is not None:
            return draws_of_call(self._seeds, position).to(device)
        return torch.cat((self._seeds.to(device)[1:], random_position(device)))
