"""Processes for tests that are forked from one process, which has imported mxtrain and all that it needs."""

import multiprocessing
import os
from multiprocessing import forkserver
from unittest import mock

PRELOADED = [
    "torch._inductor.compile_fx",
    "torchao.quantization",
    "datasets",
    "tyro",
    "tokenizers",
    "wandb",
    "mxtrain.titan.train",
]
# As in training on a CPU: without Triton's interpreter, which other tests are for.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}


def forking_context() -> multiprocessing.context.ForkServerContext:
    """Python keeps one server per process: all tests of a session must start it in the same environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context
