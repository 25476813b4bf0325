"""PyTorch 2.11 frees the memory of an asynchronous save after each save: the next one allocates it anew or fails.

The memory is pinned and as large as the state, so that allocating it stops training for longer than the copy. PyTorch
2.13 keeps it.
"""

from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class _KeptMemory(StateDictStager):
    def close(self) -> None:
        """Do nothing: PyTorch 2.11 closes this object after every save and then uses it again."""

    def free(self) -> None:
        super().close()


class KeptStager(DefaultStager):
    """Copies states to the CPU, into memory that is kept from one save to the next."""

    def __init__(self, options: StagingOptions):
        super().__init__(options)
        self._state_dict_stager = _KeptMemory(
            pin_memory=options.use_pinned_memory, share_memory=options.use_shared_memory
        )

    def close(self) -> None:
        super().close()
        self._state_dict_stager.free()
