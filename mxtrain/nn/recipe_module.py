"""Modules with a recipe, and with random numbers that follow from the job's seed and the module's name."""

import torch
import torch.nn as nn

from mxtrain.formats.hardware import Mode, check_mode
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.recipe import FORMATS, LinearRecipe
from mxtrain.formats.schedule import LayerState, Timeline
from mxtrain.rng.rounding import position_as_set, random_position
from mxtrain.rng.seeds import hadamard_signs, rounding_key, sign_mask

_LOADED = [fmt.ops for fmt in FORMATS.values()]  # with the layers, not while PyTorch traces one


class RecipeModule(nn.Module):
    """A module with a recipe, which may change between steps: ``take`` sets it, and ``timeline`` says when.

    With the first recipe that needs them, the module gets signs for its Hadamard transform and a key for its stochastic
    rounding. These numbers are a plain tensor: ``to_empty`` would lose a buffer, and ``torch.compile`` would compile
    again for every Python number.
    """

    recipe: LinearRecipe
    timeline: Timeline | None = None
    """The recipes by step; None for one recipe throughout"""
    _seeds: torch.Tensor | None = None
    """The signs, packed, and the key, int64 [2] on the device of the parameters"""
    fqn: str = ""
    """The name that ``set_seed`` was given, for messages"""

    def _set_recipe(self, recipe: str | LinearRecipe, mode: Mode) -> None:
        self.recipe = get_recipe(recipe)
        check_mode(mode, self.recipe)
        self.mode = mode

    def set_seed(self, seed: int, fqn: str) -> None:
        """Take the random numbers of layer ``fqn`` in a job with this seed.

        ``mxtrain.convert`` calls this. Before the call, and in modules made by hand, the numbers belong to seed 0 and
        the empty name.
        """
        self.fqn = fqn
        self._numbers = sign_mask(hadamard_signs(seed, fqn)), rounding_key(seed, fqn)
        self._seeds = None
        self._make_seeds()

    def take(self, state: LayerState) -> None:
        """Compute with ``state`` from now on. ``torch.compile`` compiles once for every new state."""
        self.recipe = state.recipe
        self._make_seeds()

    def _make_seeds(self) -> None:
        if self._seeds is None and not (self.recipe.needs_signs or self.recipe.needs_draws):
            return
        device = next((p.device for p in self.parameters(recurse=False)), None)
        if device is None or device.type == "meta":
            device = torch.device("cpu") if self._seeds is None else self._seeds.device
        # Fake tensors, and those made in inference mode, are of no use later.
        if self._seeds is None or self._seeds.device != device or type(self._seeds) is not torch.Tensor:
            with torch.inference_mode(False):
                self._seeds = torch.tensor(self._numbers, dtype=torch.int64, device="cpu").to(device)

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
        """Return what determines this forward's random bits, int64 [4]: key, step, microbatch and rank.

        None if the recipe rounds to nearest, or if there will be no backward.

        A backward must use the numbers of its own forward. Autograd functions therefore keep them as an attribute:
        activation checkpointing replaces saved tensors by those of a second forward.
        """
        if not (self.recipe.needs_draws and torch.is_grad_enabled()):
            return None
        position = position_as_set(device.type)
        position = random_position(device) if position is None else position.to(device)
        return torch.cat((self._seeds.to(device)[1:], position))
