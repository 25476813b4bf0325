"""The matmul that Inductor tunes, compiled by Inductor; on a CPU this needs a C++ compiler."""

import functools
import shutil
from types import SimpleNamespace

import inductor_mm as inductor
import pytest
import torch
from torch._inductor.kernel import custom_op

from mxtrain.nn.decompose_k.reference import decompose_k_mm


def operands(rows, device, columns=8, inner=256):
    torch.manual_seed(rows)
    draw = lambda *shape: torch.randn(shape, device=device).bfloat16()  # noqa: E731
    return draw(rows, inner), draw(columns, inner).t()


@pytest.mark.parametrize("wide", [False, True])
def test_eager_is_one_matmul(wide, device):
    a, b = operands(5, device)
    op = inductor.tuned_op(f"test_inductor::eager_{device}_{wide}", wide=wide, ranges=False)
    out_dtype = torch.float32 if wide else torch.bfloat16
    torch.testing.assert_close(op(a, b), decompose_k_mm(a, b, None, None, out_dtype), rtol=2**-7, atol=1e-5)


def test_splits_to_try():
    expected = {7168: [2, 4, 8, 16, 32], 255: [], 300: [2], 2**17: [2**i for i in range(1, 9)]}
    assert {inner: inductor.splits_to_try(inner) for inner in expected} == expected


@pytest.mark.skipif(not (torch.cuda.is_available() or shutil.which("g++")), reason="Inductor has no compiler")
@pytest.mark.sweep  # the first compilation takes 15 s
def test_a_dynamic_number_of_rows_is_compiled_once(device, monkeypatch):
    """The graph holds the winners of two ranges and picks one at run time."""
    torch._dynamo.reset()
    # PyTorch's limit, see ``tuned_op``.
    torch.set_default_device(None)
    winners = []

    def take_turns(*, decompositions, non_tensor_args, **kwargs):
        """In place of timing: the first choice wins the first range; the second, plus 1, wins the next range."""
        place = len(winners)
        winner = decompositions[place]
        winners.append(winner.__name__)
        marked = functools.wraps(winner)(lambda *operands, **splits: winner(*operands, **splits) + place)
        won = dict(decomposition=marked, decomposition_kwargs=non_tensor_args[place], config_patches=None)
        return None, SimpleNamespace(**won)

    monkeypatch.setattr(custom_op, "autotune_custom_op", take_turns)
    monkeypatch.setattr(inductor, "SPLIT_POINTS", (4,))
    monkeypatch.setattr(inductor, "LARGEST_M", 16)
    op = inductor.tuned_op("test_inductor::by_range", wide=True, ranges=True)
    compiled = torch.compile(lambda a, b: op(a, b), fullgraph=True)
    torch._dynamo.mark_dynamic(a := operands(3, device)[0], 0)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(a, operands(3, device)[1])
    assert winners == ["one", "chunks"]
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (2, 4, 5, 100):
            a, b = operands(rows, device)
            expected = decompose_k_mm(a, b, None, None, torch.float32) + (rows > 4)
            torch.testing.assert_close(compiled(a, b), expected)
