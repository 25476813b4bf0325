"""States of TorchTitan 0.3 as 0.2.2 saves them, so that each resumes from checkpoints of the other."""

from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

from mxtrain.titan.v03.names import name_in_022


class OptimizerStates(Stateful):
    """Moments and settings of every parameter by its name in 0.2.2: "state.layers.0.attention.wq.weight.exp_avg"."""

    def __init__(self, optimizers: OptimizersContainer):
        self._optimizers = optimizers

    def state_dict(self) -> dict:
        return {_renamed(key): value for key, value in self._optimizers.state_dict().items()}

    def load_state_dict(self, state_dict: dict) -> None:
        keys = {key: _renamed(key) for key in self._optimizers.state_dict()}
        self._optimizers.load_state_dict({key: state_dict[saved] for key, saved in keys.items()})


def _renamed(key: str) -> str:
    kind, _, rest = key.partition(".")
    name, _, last = rest.rpartition(".")
    return f"{kind}.{name_in_022(name)}.{last}"


class SchedulerStates(Stateful):
    """What the first scheduler saves. Of that, 0.3 restores the number of steps."""

    def __init__(self, schedulers: LRSchedulersContainer):
        self._schedulers = schedulers

    def state_dict(self) -> dict:
        return self._schedulers.schedulers[0].state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self._schedulers.load_state_dict(state_dict)
