"""Every use of an MXNorm's result besides its linears is refused, because the result holds no values."""

import copy
import re

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import mxtrain
from mxtrain.nn.normed_input import LOOKS, NormedInput
from tests.support.layer_checks import NormBlock, draw, fields_with_gradients, results_of

D, N = 64, 32

USES = {
    "[0]": lambda h: h[0],
    "[..., 0]": lambda h: h[..., 0],
    "[:1]": lambda h: h[:1],
    "h + h": lambda h: h + h,
    "x + h": lambda h: torch.ones(2, D) + h,
    "h * 2": lambda h: h * 2,
    "2 * h": lambda h: 2 * h,
    "h == 0": lambda h: h == 0,
    "h != h": lambda h: h != h,
    "h < h": lambda h: h < h,
    "h >= h": lambda h: h >= h,
    "bool": lambda h: bool(h),
    "0 in h": lambda h: 0 in h,
    "norm": lambda h: h.norm(),
    "index": lambda h: h.index(0),
    "count": lambda h: h.count(0),
    "float": lambda h: h.float(),
    "sum": lambda h: torch.sum(h),
    "cat": lambda h: torch.cat([h]),
    "linear": lambda h: nn.functional.linear(h, torch.ones(N, D)),
    "copy_": lambda h: torch.zeros(2, D).copy_(h),
}
UNCOMPILED = {
    "reversed": lambda h: list(reversed(h)),
    "numpy": lambda h: np.asarray(h),
    "in place": lambda h: h.mul_(2),
    "checkpoint": lambda h: checkpoint(lambda t: t[0], h, use_reentrant=False),
}
REFUSAL = (
    r"the result of MXNorm 'layers.0.attention_norm' (has no|cannot be an argument of) .* because it is no tensor and "
    "only linears can use it: name the norm in filter_fqns"
)


def new_norm() -> nn.Module:
    return NormBlock(D, N, "mxfp8").norm


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_every_use_of_a_result_is_refused(mode):
    norm = new_norm()
    for name, use in {**USES, **UNCOMPILED}.items():
        with mode(), pytest.raises((TypeError, AttributeError)) as refusal:
            use(norm(draw(2, D, seed=0)))
        assert re.search(REFUSAL, str(refusal.value)), name


@pytest.mark.parametrize("use", ["h * 2", "norm", "cat"])  # an operator, a method, a function of torch
def test_every_use_in_a_compiled_graph_is_refused(use):
    norm = new_norm()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: USES[use](norm(x)), backend="eager")
    with pytest.raises((TypeError, AttributeError), match=REFUSAL):
        compiled(draw(2, D, seed=0))


def test_a_use_behind_the_end_of_a_graph_is_refused():
    torch._dynamo.reset()
    compiled = torch.compile(USES["h * 2"], backend="eager")
    with pytest.raises(TypeError, match=REFUSAL):
        compiled(new_norm()(draw(2, D, seed=0)))


@pytest.mark.parametrize(
    "use",
    [
        lambda h: [row + 1 for row in h],
        lambda h: torch.stack(list(h)),
        lambda h: torch.cat(h),
        lambda h: sum(h),
        lambda h: torch.tensor(h),
    ],
)
def test_a_loop_over_a_result_fails_at_the_first_item(use):
    with pytest.raises((TypeError, ValueError)):
        use(new_norm()(draw(2, D, seed=0)))


class Model(nn.Module):
    """Reads the norm's output where the survey, which runs once, does not look."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.RMSNorm(D), nn.Linear(D, D)
        self.pools = False

    def forward(self, x):
        h = self.norm(x)
        return self.out(h) + (h[0] if self.pools else 0)


def test_a_path_that_the_survey_did_not_see():
    model = Model()
    mxtrain.convert(model, converter="mxnorm", mode="reference", example_inputs=(torch.zeros(2, D),))
    x = draw(2, D, seed=0)
    assert model(x).shape == (2, D)
    model.pools = True
    with pytest.raises(TypeError, match="the result of MXNorm 'norm' has no __getitem__"):
        model(x)


def test_a_result_shows_its_norm_and_has_a_shape():
    h = new_norm()(draw(2, 3, D, seed=0))
    assert h.shape == (2, 3, D)
    assert repr(h) == "<the result of MXNorm 'layers.0.attention_norm', [2, 3, 64], for linears only>"
    assert "an MXNorm" in repr(mxtrain.MXNorm(D)(draw(2, D, seed=0)))
    assert re.search(REFUSAL, str(pytest.raises(TypeError, lambda: copy.copy(h)[0]).value))


def looks(h) -> dict:
    answers = {name: getattr(h, name) for name in LOOKS}
    return {name: answer() if callable(answer) else answer for name, answer in answers.items()}


@pytest.mark.parametrize("shape", [(D,), (2, 3, D)])
def test_a_result_answers_what_the_survey_takes_for_harmless_as_a_tensor(shape):
    x = draw(*shape, seed=0)
    h, tensor = new_norm()(x), nn.RMSNorm(D)(x)
    assert looks(h) == looks(tensor)
    assert h.size(0) == tensor.size(0) and h.size(dim=-1) == tensor.size(dim=-1)


def test_a_result_has_no_dtype():
    """A plain norm's result may have another dtype than x has."""
    with pytest.raises(AttributeError, match="the result of MXNorm 'layers.0.attention_norm' has no 'dtype'"):
        getattr(new_norm()(draw(2, D, seed=0)), "dtype")  # noqa: B009


class Looks(Model):
    def forward(self, x):
        h = self.norm(x)
        batch, tokens, _ = h.size()
        assert tokens == h.size(1) == h.numel() // (batch * D) and h.dim() == h.ndim == 3
        return self.out(h).view(batch, tokens, 2, -1) + torch.ones((), device=h.device)


def test_a_compiled_model_looks_at_a_result():
    model, x = Looks(), draw(2, 3, D, seed=0)
    mxtrain.convert(model, mode="reference", filter_fqns=[], example_inputs=(x,))
    assert type(model.norm) is mxtrain.MXNorm
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, results_of(compiled, x, dy := draw(2, 3, 2, D // 2, seed=1)), results_of(model, x, dy)))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_linear_gives_the_gradient_of_its_result_to_a_hook():
    block, seen = NormBlock(D, N, "mxfp8"), []
    block.linears[0].register_full_backward_pre_hook(lambda module, gradients: seen.append(gradients))
    results_of(block, draw(2, 3, D, seed=0), dy := draw(2, 3, N, seed=1))
    assert [gradient for (gradient,) in seen] == [dy]


@pytest.mark.parametrize("mode", ["reference", "emulated"])
def test_only_what_stands_for_x_and_the_gain_need_gradients(mode):
    normed = NormBlock(D, N, "mxfp8", mode=mode).norm(draw(2, D, seed=0).requires_grad_())
    assert fields_with_gradients(normed) == {"h", "weight"}


def test_no_field_takes_the_place_of_a_method_of_tensors():
    assert {*NormedInput._fields} & {*dir(torch.Tensor)} == {"mode"}


def test_a_copy_of_a_result_trains():
    block, x = NormBlock(D, N, "mxfp8"), draw(2, D, seed=0)
    normed, linear = block.norm(x), block.linears[0]
    of_copy, expected = (
        torch.autograd.grad(linear(each).sum(), linear.weight)[0] for each in (copy.deepcopy(normed), normed)
    )
    assert torch.equal(of_copy, expected)
