"""What selective activation checkpointing knows of mxtrain's operations."""

from contextlib import nullcontext
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mxtrain
from mxtrain.formats.gemm import guarded_mm
from mxtrain.nn.decompose_k.op import decompose_k_mm
from mxtrain.parallel.activation_checkpoint import _with_own_operations, knows_own_operations
from mxtrain.rng.rounding import set_rounding_step
from tests.support.graph_checks import Calls

AMAX, SCALED, MM = (
    torch.ops.mxtrain.nvfp4_tensor_scales.default,
    torch.ops.aten._scaled_mm_v2.default,
    torch.ops.aten.mm.default,
)


def test_no_matrix_is_read_again_for_its_tensor_scale():
    """In an eager NVFP4 linear with kernels, whose backward reads dY, W and X along tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    linear = mxtrain.MXLinear(32, 32, bias=False, recipe="nvfp4", mode="emulated").to(device)
    x, dy, found = torch.randn(16, 32, device=device), torch.randn(16, 32, device=device), []
    for keeps in (False, True):
        policy = recompute_all if not keeps else _with_own_operations(recompute_all)
        set_rounding_step(1)
        linear.zero_grad()
        y = checkpoint(
            linear,
            x.clone().requires_grad_(),
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        )
        with Calls() as calls:
            y.backward(dy)
        assert calls.counts[AMAX] == (3 if keeps else 5)
        found.append(linear.weight.grad)
    assert found[0].any() and torch.equal(*found)


def recompute_all(ctx, func, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def decision(func, a: torch.Tensor, b: torch.Tensor) -> tuple:
    """What TorchTitan's policy is asked where a layer calls ``func``."""
    asked = []
    policy = _with_own_operations(lambda ctx, func, *args: asked.append((func, tuple(args[1].shape))))
    kept = policy(None, func, a, b) == CheckpointPolicy.MUST_SAVE
    return kept, *asked


def test_products_count_as_mm_with_their_size_in_elements():
    """TorchTitan computes the logits of routers again, which it finds by [K, N]. Packed NVFP4 codes are [K / 2, N]."""
    a, b = torch.empty(8, 64), torch.empty(64, 16)
    packed = torch.empty(32, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for func, second in ((SCALED, b), (SCALED, packed), (guarded_mm, b), (decompose_k_mm, b)):
        assert decision(func, a, second) == (False, (MM, (64, 16)))
    assert decision(torch.ops.aten.add.Tensor, a, b) == (False, (torch.ops.aten.add.Tensor, (64, 16)))
    assert decision(AMAX, a, b) == (True,)


def test_labels_of_profiles_may_differ_when_a_layer_is_computed_again():
    """As those of FSDP do, which gathers the weights of experts in a layer at other times then."""
    labels = []

    def layer(x):
        with torch.profiler.record_function(f"call {len(labels)}") if labels else nullcontext():
            labels.append(x)
            return x.sin().exp()

    with knows_own_operations():
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert len(labels) == 2 and torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())
