"""What a swapped layer may change between steps, and when it does."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mxtrain.recipes.recipe import LinearRecipe
from mxtrain.recipes.rms_estimate import RMSEstimate


@dataclass(frozen=True)
class LayerState:
    """What a swapped layer computes with.

    Attributes:
        recipe: of the layer; a norm has one of the linears that it feeds.
        estimate: of a norm; None for a linear.
        is_plain: a norm is an RMSNorm and the linears behind it are ``nn.Linear``, all in high precision.
    """

    recipe: LinearRecipe
    estimate: RMSEstimate | None = None
    is_plain: bool = False


@dataclass(frozen=True)
class Timeline:
    """The states of a layer over a run. The state of a step follows from its number, so a resumed run has the same.

    Attributes:
        states: step -> the state from that step on; step 1 is among them.
        fallbacks: the same while the guard has changed the recipe; empty without a guard.
    """

    states: Mapping[int, LayerState]
    fallbacks: Mapping[int, LayerState] = field(default_factory=dict)

    def at(self, step: int, falls_back: bool = False) -> LayerState:
        """Return the state of a step."""
        states = self.fallbacks if falls_back else self.states
        return states[max(first for first in states if first <= step)]

    @property
    def all_states(self) -> tuple[LayerState, ...]:
        """Every state that the layer may get."""
        return tuple(dict.fromkeys((*self.states.values(), *self.fallbacks.values())))
