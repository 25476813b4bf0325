"""A layer that is called more than once draws new random bits, which checkpointing and compilation do not change."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from mxtrain import set_rounding_step
from mxtrain.nn.recipe_module import RecipeModule
from mxtrain.recipes.parse import get_recipe
from tests.support.layer_checks import CHECKPOINTING, FQN, SEED, NormBlock, assert_near, draw, mx_linear

D, T = 32, 16

pytestmark = pytest.mark.usefixtures("device")


class Twice(nn.Module):
    """Linear layers that every forward calls twice: one by itself, and one behind a norm."""

    def __init__(self):
        super().__init__()
        self.linear, self.normed = mx_linear(D, D, "nvfp4"), NormBlock(D, D, "nvfp4")

    def forward(self, x):
        for _ in range(2):
            x = self.linear(x) + self.normed(x)[0].sin()
        return x


def repeated(linear):
    """Two calls with the same input: the gradients of the input differ only by random bits."""

    def run(x, y):
        return linear(x), linear(y)

    return run


def gradients_of_two_calls(run, step=3):
    set_rounding_step(step)
    inputs = [draw(T, D, seed=0).requires_grad_() for _ in range(2)]
    torch.autograd.backward(run(*inputs), [draw(T, D, seed=1)] * 2)
    return [x.grad for x in inputs]


def test_the_second_call_draws_other_bits_which_the_step_repeats():
    linear, x = mx_linear(D, D, "nvfp4"), draw(T, D, seed=0).requires_grad_()
    first, second = gradients_of_two_calls(repeated(linear))
    assert not torch.equal(first, second)
    again = gradients_of_two_calls(repeated(linear))
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    set_rounding_step(3)
    (alone,) = torch.autograd.grad(linear(x), x, draw(T, D, seed=1))
    assert torch.equal(first, alone), "the first call has the bits of a layer that is called once"


def gradients_of_steps(module, run, microbatches=2):
    """Gradients of two steps in which all forwards come before all backwards, as in a pipeline."""
    module.zero_grad()
    results = []
    for step in range(2):
        outputs = []
        for microbatch in range(microbatches):
            set_rounding_step(step, microbatch)
            x = draw(T, D, seed=microbatch).requires_grad_()
            outputs.append((x, run(module, x)))
        for x, y in outputs:
            y.backward(draw(T, D, seed=9))
            results.append(x.grad)
    return [*results, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_checkpointing_repeats_the_bits_of_every_call_and_microbatch(kind):
    module = Twice()
    plain = gradients_of_steps(module, lambda module, x: module(x))
    checkpointed = gradients_of_steps(module, CHECKPOINTING[kind])
    assert all(torch.equal(got, want) for got, want in zip(checkpointed, plain, strict=True))


def test_reentrant_checkpointing_draws_other_bits_for_every_call():
    """It draws inside of the backward, so in another order."""
    linear = mx_linear(D, D, "nvfp4")
    plain = gradients_of_two_calls(repeated(linear))
    got = gradients_of_two_calls(lambda *inputs: tuple(checkpoint(linear, x, use_reentrant=True) for x in inputs))
    assert all(torch.equal(*pair) for pair in zip(reversed(got), plain))


class _ShowDraws(torch.autograd.Function):
    """x -> x. The gradient of x is the lower half of the key, and the step and microbatch that were drawn for it."""

    @staticmethod
    def forward(ctx, x, draws):
        ctx.draws = draws
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        key, step, microbatch, _ = ctx.draws.unbind()
        return dy * torch.stack((key & 0xFFFFFFFF, step, microbatch)).to(dy.dtype), None


class Show(RecipeModule):
    """A layer that compiles fast and draws as those of NVFP4 do."""

    def __init__(self):
        super().__init__()
        self.recipe, self.weight = get_recipe("nvfp4"), nn.Parameter(torch.ones(3))
        self.set_seed(SEED, FQN)

    def forward(self, x):
        return _ShowDraws.apply(x * self.weight, self.draws(x.device))


def drawn_by_two_calls(run, step=3, microbatch=0):
    """Draws for two calls with equal inputs, in the order of the inputs."""
    set_rounding_step(step, microbatch)
    inputs = [torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    torch.autograd.backward(run(*inputs), [torch.ones(3, dtype=torch.float64)] * 2)
    return [x.grad if x.grad is None else x.grad.tolist() for x in inputs]


def compiled(run, backend):
    return torch.compile(run, backend=backend, fullgraph=True)


@pytest.mark.parametrize("kind", [None, *CHECKPOINTING])
def test_calls_in_one_compiled_graph_draw_the_bits_of_eager_ones(kind, compile_backend):
    """Without compiling again for every step, and for another layer."""
    for seed, name in enumerate(("a layer", "another layer")):
        layer = Show()
        layer.set_seed(seed, name)
        call = layer if kind is None else lambda x: CHECKPOINTING[kind](layer, x)  # noqa: B023
        run = compiled(repeated(call), compile_backend)
        for step in (3, 4):
            with torch._dynamo.config.patch(error_on_recompile=step > 3):
                first, second = drawn_by_two_calls(run, step)
            assert first != second and [first, second] == drawn_by_two_calls(repeated(layer), step)


def test_a_layer_and_its_copy_draw_the_bits_of_two_calls(compile_backend):
    layer = Show()
    copied = copy.deepcopy(layer)
    want = drawn_by_two_calls(repeated(layer))
    assert want[0] != want[1] and drawn_by_two_calls(lambda x, y: (copied(x), y))[0] == want[0]

    def both(x, y):
        return layer(x), copied(y)

    assert drawn_by_two_calls(both) == drawn_by_two_calls(compiled(both, compile_backend)) == want
    alone = compiled(layer, compile_backend), compiled(copied, compile_backend)
    with pytest.raises(RuntimeError, match="give a copy of a layer other bits with set_seed"):
        drawn_by_two_calls(lambda x, y: (alone[0](x), alone[1](y)))
    copied.set_seed(SEED, "a copy")
    got = drawn_by_two_calls(lambda x, y: (alone[0](x), alone[1](y)))
    assert got[0] == want[0] and got[1] not in want


def test_compiled_calls_with_one_input_are_not_merged(compile_backend):
    layer = Show()
    together, _ = drawn_by_two_calls(compiled(lambda x, _: (layer(x), layer(x)), compile_backend))
    assert together == [sum(pair) for pair in zip(*drawn_by_two_calls(repeated(layer)))]


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_compiled_checkpointing_repeats_the_bits_of_every_microbatch(kind, compile_backend):
    """In a pipeline: all forwards before all backwards."""
    layer = Show()
    run = compiled(CHECKPOINTING[kind], compile_backend)
    inputs, outputs = [], []
    for microbatch in range(3):
        set_rounding_step(5, microbatch)
        inputs.append(torch.zeros(3, dtype=torch.float64, requires_grad=True))
        outputs.append(run(layer, inputs[-1]))
    for y in outputs:
        y.sum().backward()
    assert [x.grad[1:].tolist() for x in inputs] == [[5, microbatch] for microbatch in range(3)]
    assert len({float(x.grad[0]) for x in inputs}) == 1


def test_a_compiled_mx_linear_that_is_called_twice_matches_an_eager_one(compile_backend):
    linear = mx_linear(D, D, "nvfp4", "emulated")  # kernels compile faster than their reference
    got = gradients_of_two_calls(compiled(repeated(linear), compile_backend))
    assert not torch.equal(*got)
    assert_near(got, gradients_of_two_calls(repeated(linear)), 2e-2 if compile_backend == "inductor" else 1e-6)


def test_graphs_that_would_repeat_bits_are_refused(compile_backend):
    """A graph that runs twice, by itself and inside of two kinds of checkpoints."""
    graph = compiled(Show(), compile_backend)
    in_checkpoints = lambda x: checkpoint(graph, x, use_reentrant=False)  # noqa: E731
    in_reentrant_checkpoints = lambda x: checkpoint(graph, x, use_reentrant=True)  # noqa: E731
    for call in (graph, in_checkpoints, in_reentrant_checkpoints):
        with pytest.raises(RuntimeError, match="ran twice at one position and would repeat its random bits: call mxt"):
            drawn_by_two_calls(repeated(call))
        once = [drawn_by_two_calls(lambda x, y: (call(x), y), 3, microbatch)[0] for microbatch in (0, 1)]  # noqa: B023
        assert [draws[1:] for draws in once] == [[3, 0], [3, 1]]
