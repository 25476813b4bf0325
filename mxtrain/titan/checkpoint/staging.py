"""Copies a state to the CPU for asynchronous saving, into pinned memory that is kept from one save to the next.

The first save allocates the memory, as much as the state has bytes. Later saves only copy, at the speed of the bus.
"""

from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class _KeptMemory(StateDictStager):
    def close(self) -> None:
        """Do nothing: PyTorch 2.11 closes this object after every save and then uses it again."""

    def free(self) -> None:
        super().close()


class KeptStager(DefaultStager):
    """DCP's stager, which lives as long as the run.

    Args:
        in_background: copy while the next step runs, into memory that another process can read.
    """

    def __init__(self, in_background: bool):
        super().__init__(
            StagingOptions(
                use_pinned_memory=True,
                use_shared_memory=in_background,
                use_async_staging=in_background,
                use_non_blocking_copy=True,
            )
        )
        self._state_dict_stager = _KeptMemory(pin_memory=True, share_memory=in_background)

    def close(self) -> None:
        super().close()
        self._state_dict_stager.free()
