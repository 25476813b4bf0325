"""FSDP2 gathers codes: operands and gradients of two processes against one, and the bytes that collectives send."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from mxtrain import ConfigError, MXLinear
from mxtrain.formats.collectives import GATHER_PARTS
from mxtrain.parallel.fsdp_gather import CodeGather, _Shard, _weights_of, gathered_bytes
from tests.support.expert_checks import quantized_experts
from tests.support.layer_checks import NormBlock, assert_near, draw, in_two_processes

D, H, TOKENS, STEPS, MICROBATCHES = 64, 128, 64, 2, 2
TILES = "mxfp8_2d"


class FeedForward(NormBlock):
    """A norm with a gain, two linears behind it, and one whose input no norm makes."""

    def __init__(self, recipe=TILES, hidden=H, **settings):
        super().__init__(D, hidden, recipe, recipe, **settings)
        for linear in self.linears:
            linear.fed_by = (self.norm,)
        self.last = MXLinear(hidden, D, bias=False, recipe=recipe, mode=settings.get("mode", "reference"))
        with torch.no_grad():
            self.last.weight.copy_(draw(D, hidden, seed=20))
            for linear in (*self.linears, self.last):
                linear.weight.mul_(0.1)

    def forward(self, x):
        gate, up = super().forward(x)
        return x + self.last(gate * up)


class Mixture(nn.Module):
    """Four experts behind a norm with a gain, which all get as many tokens."""

    def __init__(self, mode):
        super().__init__()
        self.norm = NormBlock(D, H, TILES, mode=mode).norm
        self.experts = quantized_experts(D, H, 4, TILES, mode)
        self.experts.fed_by = (self.norm,)

    def forward(self, x):
        return x + self.experts(x, torch.full((4,), TOKENS // 4))


class Bytes(TorchDispatchMode):
    """Counts the bytes that this process gives to each kind of collective."""

    def __init__(self):
        super().__init__()
        self.given = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is GATHER_PARTS:
            self.given["gains"] += sum(part.numel() * part.itemsize for part in args[0])
        elif func.namespace == "c10d" and len(args) > 1 and torch.is_tensor(args[1]):
            self.given[func.__name__.split("_base")[0]] += args[1].numel() * args[1].itemsize
        return func(*args, **(kwargs or {}))


def model_of(*blocks, **settings) -> nn.Module:
    return nn.Sequential(*(FeedForward(*block, **settings) for block in blocks or [()] * 2))


def shard(model, mesh, param_dtype=torch.bfloat16, **settings) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for block in [*model, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy, **settings)
    for block in [*model, model]:
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)
    return model


def batch(step: int, microbatch: int) -> torch.Tensor:
    """All tokens of both processes [2, TOKENS, D]."""
    return draw(2, TOKENS, D, seed=100 + 10 * step + microbatch)


def train(model, part, finish, microbatches=range(MICROBATCHES)) -> list[list[torch.Tensor]]:
    """Return the gradients of the steps of SGD, in which all layouts see the same tokens."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(STEPS):
        for microbatch in microbatches:
            model(batch(step, microbatch)[part]).square().sum().backward()
        finish()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        found.append([grad.clone() for grad in grads])
        optimizer.step()
        optimizer.zero_grad()
    return found


def check_training(mode, settings, mesh):
    """Gradients of fp32 are those of one process. The operands of bf16 have the bits of one process's."""
    one = model_of(mode=mode)
    whole = train(one, slice(None), lambda: None)
    model = shard(model_of(mode=mode), mesh, torch.float32, **settings)
    assert type(next(model.parameters()).to_local()) is torch.Tensor
    gather = CodeGather([model], 2, 2)
    assert str(gather) == "FSDP gathers 6 weights as codes"
    for step, (ours, theirs) in enumerate(zip(train(model, mesh.get_local_rank(), gather.finish_gradients), whole)):
        assert_near(ours, theirs, 1e-5 if step == 0 else 1e-2)
    for values in (model.state_dict(), dict(model.named_parameters())):
        assert all(
            type(tensor.to_local()) is type(tensor.detach()._local_tensor) is torch.Tensor for tensor in values.values()
        )
    check_operands(mode, mesh)


def check_operands(mode, mesh):
    """Linears and experts have the operands of one process, in which gains are folded."""
    one, seen = model_of(mode=mode).append(Mixture(mode)), []
    model = shard(model_of(mode=mode).append(Mixture(mode)), mesh)
    assert len(CodeGather([model], 2, 2).weights) == 9
    hook = partial(lambda layer, *_: seen.extend(w.detach().clone() for w, _ in _weights_of(layer)))
    for layer in model.modules():
        if getattr(layer, "gathers_codes", False):
            layer.register_forward_pre_hook(hook)
    with torch.no_grad():
        model(batch(0, 0)[mesh.get_local_rank()])
    layers = [module for module in one.modules() if hasattr(module, "gathers_codes")]
    weights = [(layer, weight, norm) for layer in layers for weight, norm in _weights_of(layer)]
    for values, (layer, weight, norm) in zip(seen, weights, strict=True):
        operands = layer.gemms(values.device).quantize_weights([weight], norm and norm.gain())
        assert values.dtype == torch.bfloat16
        values = values.flatten(0, -2).float()
        assert torch.equal(values, operands[1].data.float()) and torch.equal(values.t(), operands[0].data.float())


def parallelism(**settings) -> SimpleNamespace:
    degrees = {f"{kind}_parallel_degree": 1 for kind in ("tensor", "pipeline", "expert")}
    return SimpleNamespace(**degrees | {"fsdp_reshard_after_forward": "default"} | settings)


def check_bytes(mesh):
    """Forward and backward gather as many bytes as are told to the user, and gradients stay fp32."""
    weights, gains = 3 * D * H, D
    plain, codes, grads = 4 * (weights + gains), 2 * (weights * (1 + 1 / 1024) + 2 * gains), 8 * (weights + gains)
    model = model_of()
    found = gathered_bytes(
        model, dict(model.named_parameters()), 2, 2, parallelism(fsdp_reshard_after_forward="always")
    )
    assert found == [[plain, plain, grads], [codes, codes, grads]]
    for setting, gathered in (("high_precision", plain), ("quantized", codes)):
        model = shard(model_of(), mesh)
        gather = CodeGather([model], 2, 2) if setting == "quantized" else None
        with Bytes() as counter:
            model(batch(0, 0)[0]).sum().backward()
            if gather is not None:
                gather.finish_gradients()
        given = counter.given
        # For the forward and for the backward; each process gives its half.
        assert given["_allgather"] == 2 * gathered / 2, (setting, given)
        assert given["_reduce_scatter"] == 2 * (weights + (0 if gather else gains)) * 4, (setting, given)
        assert given["gains"] == (2 * gains * 4 / 2 if gather else 0)


def check_kept(mesh):
    """Weights that have no codes are gathered in high precision beside codes, and train."""
    model = model_of((), ("mxfp8",), (TILES, 96))
    model[0].last.weight.requires_grad_(False)
    shard(model, mesh, torch.float32)
    gather = CodeGather([model], 2, 2)
    assert len(gather.weights) == 3
    for reason in (
        "1 in high precision: they are tied, computed or frozen",
        "3 in high precision: fprop and dgrad do not share",
    ):
        assert reason in str(gather)
    assert "2 in high precision: 96 rows or experts over 2 processes are not whole tiles" in str(gather)
    one = model_of((), ("mxfp8",), (TILES, 96))
    one[0].last.weight.requires_grad_(False)
    one(batch(0, 0)).square().sum().backward()
    model(batch(0, 0)[mesh.get_local_rank()]).square().sum().backward()
    gather.finish_gradients()
    grads = [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]
    assert_near(grads, [p.grad for p in one.parameters() if p.requires_grad], 1e-5)


def check_reasons(mesh):
    """Other weights that have no codes, and only those."""
    model = model_of((), (), ())
    tied, unknown, columns = model
    tied.linears[1].weight = tied.linears[0].weight
    for linear in (*unknown.linears, unknown.last):
        linear.fed_by = None
    shard(model, mesh, shard_placement_fn=lambda p: Shard(1) if p is columns.last.weight else None)
    gather = CodeGather([model], 2, 2)
    assert gather.kept == {
        "they are tied, computed or frozen": 2,
        "their norm is unknown": 3,
        "FSDP shards another dimension than rows": 1,
    }
    assert [weight.layer for weight in gather.weights] == [tied.last, *columns.linears]


def check_without_extension(mesh):
    """A PyTorch that ignores the extension gathers weights without their gain."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            patch.delattr(_Shard, name)
        model = shard(model_of(), mesh)
        CodeGather([model], 2, 2)
        with pytest.raises(ConfigError, match="fsdp_gather = 'quantized': FSDP .* gathers no codes, because"):
            model(batch(0, 0)[0])


def check_all(mesh):
    check_training("reference", {}, mesh)
    check_bytes(mesh)
    check_kept(mesh)
    check_reasons(mesh)
    check_without_extension(mesh)


def test_two_processes_have_the_operands_and_gradients_of_one():
    in_two_processes(check_all, "cpu")


@pytest.mark.sweep
@pytest.mark.parametrize(("mode", "reshard"), [("emulated", True), ("reference", False)])
def test_kernels_and_weights_that_stay_gathered(mode, reshard):
    in_two_processes(partial(check_training, mode, {"reshard_after_forward": reshard}), "cpu")


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_nothing_to_gather_is_refused(recipe):
    with pytest.raises(
        ConfigError, match="fsdp_gather = 'quantized' finds no weight .*: fprop and dgrad do not share a code"
    ):
        CodeGather([model_of((recipe,))], 2, 2)
