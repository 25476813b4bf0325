"""What tests of layers share: inputs, a norm with its linears, gradients, and two processes to shard over."""

import os
import socket
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mxtrain import MXLinear, MXNorm, MXNormLinear
from mxtrain.nn.normed_input import NormedInput

SEED, FQN, NORM = 3, "layers.0.attention.wq", "layers.0.attention_norm"


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Gaussian numbers, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu") * scale
    return x.to(dtype).to(torch.get_default_device())


def fill(module: nn.Module) -> nn.Module:
    """Give every parameter Gaussian values of its own."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=10 + i, dtype=parameter.dtype))
    return module


def mx_linear(dim: int, outputs: int, recipe, mode="reference", dtype=torch.float32, bias=False) -> MXLinear:
    linear = MXLinear(dim, outputs, bias=bias, recipe=recipe, mode=mode, dtype=dtype)
    linear.set_seed(SEED, FQN)
    return fill(linear)


class NormBlock(nn.Module):
    """One norm that feeds a linear for each recipe, as attention_norm feeds wq, wk and wv."""

    def __init__(
        self,
        dim,
        outputs,
        *recipes,
        norm=None,
        mode="reference",
        dtype=torch.float32,
        affine=True,
        bias=False,
        **settings,
    ):
        super().__init__()
        common = dict(mode=mode, dtype=dtype)
        self.norm = MXNorm(dim, elementwise_affine=affine, recipe=norm or recipes[0], **common, **settings)
        self.norm.set_seed(SEED, NORM)
        self.linears = nn.ModuleList(MXNormLinear(dim, outputs, bias=bias, recipe=r, **common) for r in recipes)
        for i, linear in enumerate(self.linears):
            linear.set_seed(SEED, f"w{i}")
        fill(self)

    def forward(self, x):
        normed = self.norm(x)
        return [linear(normed) for linear in self.linears]


def results_of(module, x, *dys) -> list[torch.Tensor]:
    """Outputs, and gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    outputs = module(x)
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, [x, *module.parameters()], dys)]


def fields_with_gradients(normed: NormedInput) -> set[str]:
    """Names of the fields with a tensor that needs a gradient."""
    leaves = {name: torch.utils._pytree.tree_leaves(value) for name, value in normed._asdict().items()}
    return {name for name, found in leaves.items() if any(getattr(leaf, "requires_grad", False) for leaf in found)}


def assert_near(results, expected, tolerance: float) -> None:
    """Relative error norms."""
    for got, want in zip(results, expected, strict=True):
        error = (got.double().reshape(want.shape) - want.double()).norm()
        assert error <= tolerance * want.double().norm()


def save_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


# Activation checkpointing as TorchTitan applies it: callables (module, x) -> output.
CHECKPOINTING = {
    "full": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_matmuls)
    ),
}


def in_two_processes(check: Callable, device: str) -> None:
    """Call ``check(mesh)``, a module's own function, in two processes joined by gloo. CPU only."""
    if device != "cpu":
        pytest.skip("two processes of gloo, on the CPU")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A forked process has imported everything, but cannot use a GPU that this one has used.
    method = "fork" if not torch.cuda.is_available() and _forks_have_autograd() else "spawn"
    torch.multiprocessing.start_processes(_process, (check, port), nprocs=2, start_method=method)


def _forks_have_autograd() -> bool:
    """PyTorch refuses backward passes in forks of a process whose engine has threads, as after some trainings."""
    if (child := os.fork()) == 0:
        try:
            torch.ones((), requires_grad=True).backward()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _process(rank: int, check: Callable, port: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    check(init_device_mesh("cpu", (2,)))
    # The last transfer goes one way: its sender must not exit before the transfer arrives.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
