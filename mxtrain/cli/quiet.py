"""What a process shows: which warnings of libraries it hides, and streams that are closed or lack characters.

Some warnings appear while PyTorch, torchao and TorchTitan are imported, so this module imports none of them.
"""

import io
import logging
import os
import re
import sys
import warnings

FLAG = "--verbose"
VARIABLE = "MXTRAIN_VERBOSE"

# Beginnings of messages given to ``warnings.warn``, as regular expressions.
PYTHON_WARNINGS = (
    # torchdata's StatefulDataLoader calls a function that PyTorch has deprecated.
    r"'set_vital' is deprecated",
    # TorchTitan enters autocast for float32 too, where autocast on a CPU has nothing to do.
    r"In CPU autocast, but the target dtype is not supported",
    # torchao and torchdata still use TorchScript.
    r"`torch\.jit\.\w+` is (deprecated|not supported in Python 3\.14)",
    # torchao registers its classes with pytree again when it is imported a second way.
    r".* is already registered as pytree node",
    # Python 3.12 compiles a docstring of torchao 0.17, where pip has not done so.
    r"invalid escape sequence",
    # PyTorch's collectives and sharded tensors work on CPU process groups, less checked than on GPUs.
    r"DTensor (random operators|manual_seed\(\)) may not have complete support on cpu device mesh",
    r"Set timeout is now only supported for either nccl or gloo",
    # torch.compile of Llama's rotary embedding, which multiplies complex numbers.
    r"Torchinductor does not support code generation for complex operators",
    # Tensor parallelism of an embedding, whose result nothing changes in place.
    r"FSDP2-wrapped module \(\w+\) returned a view tensor",
    # TorchTitan's norms of queries and keys have float32 weights, and get bf16 from autocast.
    r"Mismatch dtype between input and weight",
    # PyTorch 2.14 itself still calls functions that it has renamed.
    r"`torch\.distributed\.\w+` is deprecated",
    # TorchTitan 0.3 sets the step of a resumed schedule itself.
    r"To get the last learning rate computed by the scheduler",
    # A package beside PyTorch was renamed; PyTorch finds it under either name.
    r"The pynvml package is deprecated",
    # TorchTitan calls barrier() without a device.
    r"(No device id is provided via|barrier\(\): using the device under current context)",
    # torch.compile reports what it decided for one kernel.
    r"\s*Online softmax is disabled on the fly",
    # TorchTitan has no setting for TensorFloat32, and mxtrain's matrix products do not use it.
    r"TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled",
    r"Please use the new API settings to control TF32 behavior",
    # torch.compile traces a function that PyTorch itself caches.
    r"Dynamo detected a call to a `functools\.lru_cache`-wrapped function",
    # Checkpoints: PyTorch's distributed checkpoint reads tensors through a class that PyTorch has deprecated.
    r"TypedStorage is deprecated",
    # mxtrain reads and writes some checkpoints in one process, as this warning says.
    r"torch\.distributed is disabled, unavailable or uninitialized",
    # wandb declares fields in a way that newer releases of pydantic warn about.
    r"The '\w+' attribute with value .* was provided to the `Field\(\)` function",
)

# Logger -> beginning of the message, as a regular expression.
LOG_RECORDS = {
    # torchao's compiled extensions do not fit this PyTorch. mxtrain uses none of them.
    "torchao": r"(Skipping import of cpp extensions|Failed to load .*\.so)",
    # torchao registers enumerations in a way that PyTorch has deprecated.
    "torch.utils._pytree": r".* is an Enum subclass",
    # On a mesh of two dimensions, PyTorch reduces or gathers over one dimension after the other.
    "torch.distributed.tensor._redistribute": r"While redistributing from ",
}


def take_verbose(flags: list[str]) -> tuple[bool, list[str]]:
    """Return whether ``flags`` holds --verbose or MXTRAIN_VERBOSE is set, and the other flags."""
    others = [flag for flag in flags if flag != FLAG]
    return len(others) < len(flags) or os.environ.get(VARIABLE, "0") not in ("", "0"), others


def hide_library_warnings() -> None:
    """Hide the warnings above, on which a user cannot act, in this process. Call before PyTorch is imported."""
    for beginning in PYTHON_WARNINGS:
        warnings.filterwarnings("ignore", message=beginning)
    for name, beginning in LOG_RECORDS.items():
        # Record by record: the other warnings of these loggers stay.
        logging.getLogger(name).addFilter(lambda record, p=re.compile(beginning): not p.match(record.getMessage()))


def open_closed_streams() -> None:
    """Give a process whose stdout or stderr is closed one that takes everything. Python has None there.

    A shell closes them with ``>&-``, and so do some service managers. Characters that an open stream lacks, such as a
    plus-minus sign or those of a folder's name, become question marks.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
