"""TorchTitan's compiled attention, compiled at its first call instead of at its import.

TorchTitan 0.2.2 calls ``torch.compile`` for flexible and variable-length attention while its module of attention is
imported. The call compiles nothing yet, but it imports Inductor: 0.8 s of every worker's start, for functions that most
runs never call.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

ATTENTION = "torchtitan.models.attention"


class CompiledLater:
    """``torch.compile(function, **options)``, which is called when this is called for the first time."""

    def __init__(self, function: Callable, **options):
        self._function, self._options = function, options

    @functools.cached_property
    def _compiled(self) -> Callable:
        return torch.compile(self._function, **self._options)

    def __call__(self, *args, **kwargs):
        # A layer that is being compiled contains the function itself, as it would contain a compiled function's.
        return (self._function if torch.compiler.is_compiling() else self._compiled)(*args, **kwargs)


@contextmanager
def attention_compiled_later() -> Iterator[None]:
    """Let TorchTitan's module of attention be imported inside this context without Inductor."""
    compile_now = torch.compile

    def compile_later(*args, **options):
        caller = sys._getframe(1).f_globals["__name__"]
        return (CompiledLater if caller == ATTENTION else compile_now)(*args, **options)

    with patch.object(torch, "compile", compile_later):
        yield
