"""Opens the streams that a process was started without, as by ``>&-`` in a shell or by some service managers.

A terminal or a pipe may also lack characters, such as a plus-minus sign or those of a folder's name.
"""

import io
import os
import sys


def open_closed_streams() -> None:
    """Give a process whose stdout or stderr is closed one that takes everything. Python has None there.

    Characters that an open stream lacks become question marks.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
