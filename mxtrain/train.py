"""Worker of ``torchrun ... -m mxtrain.train --job.config_file CONFIG.toml [--verbose] [any TorchTitan flag]``.

``--resume RUN`` in the place of ``--job.config_file CONFIG.toml`` continues a run with its own settings.
"""

import os
import signal
import sys

from mxtrain.cli.console import hide_library_warnings, open_closed_streams, take_verbose
from mxtrain.cli.doctor import warn_of_untested_packages
from mxtrain.launched import COMPILE_VARIABLE, START_VARIABLE, end_with_launcher, let_memory_segments_grow

if __name__ == "__main__":
    open_closed_streams()
    end_with_launcher()
    let_memory_segments_grow(os.environ)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Before training there is nothing to save: like SIGTERM, SIGINT ends the worker at once, without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    verbose, arguments = take_verbose(sys.argv[1:])
    if not verbose:
        hide_library_warnings()
    if START_VARIABLE not in os.environ and os.environ.get("RANK") == "0":
        warn_of_untested_packages()
    # Imported here because PyTorch, torchao and TorchTitan warn while they are imported.
    if COMPILE_VARIABLE in os.environ:
        from mxtrain.compile.passes import start_compile_workers

        start_compile_workers()
    from mxtrain.titan.train import work

    sys.exit(work(arguments, verbose))
