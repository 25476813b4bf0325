"""Processes that read ahead for a data loader. They outlive stop signals, and end with the process that reads."""

import atexit
import signal
from weakref import WeakSet

from torchdata.stateful_dataloader import StatefulDataLoader

from mxtrain.launched import stop_signals

_loaders: WeakSet[StatefulDataLoader] = WeakSet()


def ignore_stop_signals(worker: int) -> None:
    """For data loader workers, which get the signal too if it goes to a whole group: their reader decides."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


def end_workers_at_exit(loader: StatefulDataLoader) -> None:
    """Let workers that ignore stop signals end when this process does.

    A loader that is not read to its end has workers until it is collected, which at the end of a process is too late:
    Python then sends SIGTERM to them and waits for ever.
    """
    _loaders.add(loader)


@atexit.register  # after PyTorch and multiprocessing registered theirs, so it runs before these
def _end_workers() -> None:
    for loader in list(_loaders):
        # Without workers there is an iterator that has no such method, or none.
        if hasattr(loader._iterator, "_shutdown_workers"):
            loader._iterator._shutdown_workers()
