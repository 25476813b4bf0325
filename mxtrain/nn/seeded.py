"""Modules with numbers of their own that follow from the job's seed and their name."""

import torch
import torch.nn as nn

from mxtrain.recipes.recipe import LinearRecipe
from mxtrain.rng.rounding_position import position
from mxtrain.rng.seeds import hadamard_signs, rounding_key, sign_mask


class Seeded(nn.Module):
    """Adds the signs of the Hadamard transform and the key of stochastic rounding to a module with a recipe.

    Not a buffer, which ``to_empty`` would lose, nor plain numbers, for each of which ``torch.compile`` would compile
    anew. Modules whose recipe needs none have none.
    """

    recipe: LinearRecipe
    # int64 [2] on the device of the parameters: signs packed by ``mxtrain.rng.seeds.sign_mask``, key.
    _seeds: torch.Tensor | None = None

    def set_seed(self, seed: int, fqn: str) -> None:
        """Take the numbers of the layer that is called ``fqn`` in a job with this seed.

        ``mxtrain.convert`` does this. Until it is done a module has the numbers of seed 0 and no name, like every other
        one made by hand.
        """
        if not self.recipe.needs_seeds:
            return
        numbers = [
            sign_mask(hadamard_signs(seed, fqn)),
            rounding_key(seed, fqn),
        ]
        self._seeds = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._move_seeds()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._move_seeds()
        return self

    def _move_seeds(self) -> None:
        device = next((p.device for p in self.parameters(recurse=False)), None)
        if self._seeds is not None and device is not None and device.type != "meta":
            self._seeds = self._seeds.to(device)

    def signs(self, device: torch.device) -> torch.Tensor | None:
        """The packed signs, int64 []; None if the recipe has no transform."""
        return self._seeds.to(device)[0] if self.recipe.needs_signs else None

    def draws(self, device: torch.device) -> torch.Tensor | None:
        """What the random bits of a backward follow from (``Draws``); None if none is needed."""
        if not (self.recipe.needs_draws and torch.is_grad_enabled()):
            return None
        return torch.cat((self._seeds.to(device)[1:], position(device)))
