"""Opens the streams that a process was started without, as by ``>&-`` in a shell or by some service managers."""

import os
import sys


def open_closed_streams() -> None:
    """Give a process whose stdout or stderr is closed one that takes everything. Python has None there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
