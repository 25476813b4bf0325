"""Graphs that launch kernels themselves have the bits of those that call ops."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from mxtrain.compile import first_step, launches, passes
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.parse import get_recipe
from tests.support.graph_checks import assert_same, draw, graph_after, operations

pytestmark = pytest.mark.usefixtures("kernels")

REPOSITORY = Path(__file__).parents[2]
T, D = 70, 128
LAUNCH = "triton_kernel_wrapper_functional"
RECIPE = get_recipe("mxfp8").fprop
ESTIMATE, ESTIMATE_16 = RMSEstimate.for_recipe(RECIPE), RMSEstimate.for_recipe(get_recipe("nvfp4_row").fprop)


def kernels_of_each_kind(x, w, gain):
    """An op with two launches, and ops whose result is one tensor, a list or a tuple."""
    from mxtrain.formats.mx.cast import cast
    from mxtrain.formats.mx.norm import mxnorm_cast
    from mxtrain.formats.mx.swiglu_cast import swiglu_backward_cast, swiglu_cast
    from mxtrain.formats.nvfp4.cast import nvfp4_cast
    from mxtrain.formats.nvfp4.norm import nvfp4_norm, nvfp4_rows
    from mxtrain.formats.nvfp4.tensor_scale import nvfp4_tensor_scales
    from mxtrain.formats.nvfp4.weight_cast import nvfp4_weight
    from mxtrain.norms.mxnorm_backward import fold_backward, norm_backward

    normed = mxnorm_cast(x, ESTIMATE, RECIPE, "image")
    joined = cast([w, w + 1], RECIPE, (1, 0), "blocked", column_factor=gain)
    dx = norm_backward(normed.data * 2, x, normed.rho)
    halves = swiglu_backward_cast(x * 3, x, dx, True, True, True, True, "e4m3", "e4m3", "rceil", "image")
    numbers = (gain.narrow(0, 0, 4) * 1000).abs().long()  # indexing would initialize a GPU
    signs, draws = numbers.sum(), [numbers, numbers + 1]
    scales = nvfp4_tensor_scales([w, w + 1], signs)
    gradient = nvfp4_cast([w, w + 1], scales, "image", signs=signs, draws=draws, axis=1)
    of_weights = [nvfp4_tensor_scales([each], None, None, gain) for each in (w, w + 1)]
    weight = nvfp4_weight([w, w + 1], of_weights, "image", gain)
    rows = [
        *nvfp4_norm(x, ESTIMATE_16, None, "blocked", dx),
        *nvfp4_rows(x, None, "codes"),
        *nvfp4_rows(x, gain.narrow(0, 0, T)),
    ]
    nvfp4 = [gradient[1].data, gradient[0].data, weight[1].data, *rows]
    merged = [
        *mxnorm_cast(x, ESTIMATE, RECIPE, "merged_input"),
        *cast(x, RECIPE, (1, 0), "merged_gradient")[0],
        *swiglu_cast(x * 3, x, True, False, "e4m3", "rceil", "merged_input"),
    ]
    results = [*merged, *normed, *joined[1], *joined[0], dx, *fold_backward(w.float(), w, gain), *halves, *nvfp4]
    return [each.view(torch.uint8) if each.itemsize == 1 else each for each in results if each is not None]


def inputs():
    return draw(T, D, seed=0).bfloat16(), draw(32, D, seed=1).bfloat16(), draw(D, seed=2)


def test_the_bits_are_those_of_the_ops(monkeypatch):
    monkeypatch.setattr(launches, "DEVICES", ("cpu", "cuda"))
    module = graph_after(launches.launch_from_graphs, kernels_of_each_kind, *inputs())
    names = operations(module)
    assert not any(name.startswith("mxtrain") for name in names)
    kernels = [node for node in module.graph.nodes if LAUNCH in str(node.target)]
    assert len(kernels) == 21  # casts of two matrices have two, and so have merged casts along both dimensions
    filled = [kernel.kwargs["kwargs"][name] for kernel in kernels for name in kernel.kwargs["tensors_to_clone"]]
    assert not any("view" in node.name or "alias" in node.name for node in filled)
    assert_same(module, kernels_of_each_kind, *inputs())


def test_symbolic_rows(monkeypatch):
    """As of experts, whose number of rows changes from step to step."""
    from mxtrain.formats.mx.cast import cast

    def cast_in_order(x, source):
        torch._check(x.shape[1] == D)  # in a model, the weight says this
        return [each.data for each in cast(x, RECIPE, (1, 0), "image", source=source).values()]

    monkeypatch.setattr(launches, "DEVICES", ("cpu", "cuda"))
    x, _, _ = inputs()
    source = torch.arange(96) - 10
    graph_after(first_step.note_launches, cast_in_order, x, source, symbolic=True)
    assert not first_step._ahead, "no worker knows these numbers yet"
    module = graph_after(launches.launch_from_graphs, cast_in_order, x, source, symbolic=True)
    assert any(LAUNCH in name for name in operations(module))
    assert_same(module, cast_in_order, x, torch.arange(128) - 70)


def test_ops_that_know_no_launch_for_symbolic_rows_stay(monkeypatch):
    from mxtrain.norms.kernels import row_norm

    def ops(x):
        y, _, rstd, _ = row_norm(x, None, None, 1e-5, None, False)
        return y, rstd

    monkeypatch.setattr(launches, "DEVICES", ("cpu", "cuda"))
    x, _, _ = inputs()
    module = graph_after(launches.launch_from_graphs, ops, x, symbolic=True)
    assert not any(LAUNCH in name for name in operations(module))
    assert_same(module, ops, x)


@pytest.mark.sweep
def test_inductor_compiles_the_kernels_for_a_gpu(device):
    if device == "cuda":
        pytest.skip("test_compiled_code_calls_no_op runs the code")
    command = [sys.executable, "-m", "tests.support.inductor_for_gpu"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found["compiled"]) == 21 and not found["unwanted"], found
    assert "Encountered an exception" not in run.stderr, run.stderr  # then PyTorch would clone all tensors
    assert found["analyses"] == 0, found
    assert found["same_calls"] and found["same_kernels"] and found["begun"]
    assert found["registers"] == ["168"], found
    # A product, over which Inductor writes what both casts read, and two images.
    assert found["allocated"] == [f"{T}, {D}"] * 3


def test_compiled_code_calls_no_op(device):
    if device != "cuda":
        pytest.skip("Inductor launches kernels on GPUs")
    torch._dynamo.reset()
    passes.install()
    try:
        (found, (code,)) = run_and_get_code(torch.compile(kernels_of_each_kind, fullgraph=True), *inputs())
    finally:
        passes.remove()
    assert "torch.ops.mxtrain" not in code
    for one, other in zip(found, kernels_of_each_kind(*inputs()), strict=True):
        assert torch.equal(one, other)
