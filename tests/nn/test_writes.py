"""Writes to tensors are counted wherever PyTorch counts them."""

import torch

from mxtrain.nn.normed_input import writes_to
from mxtrain.nn.three_gemms import version


def test_every_write_counts_also_through_a_view():
    x = torch.zeros(4)
    before = version(x)
    x[:2].add_(1)
    assert version(x) == before + 1
    assert version(x.clone()) == 0


def test_writes_go_with_the_tensor_that_they_were_counted_for():
    x = torch.zeros(4)
    x.add_(1)
    assert writes_to(x) == (id(x), 1)
    assert writes_to(x.clone()) != writes_to(x)


def test_an_inference_tensor_has_no_count():
    with torch.inference_mode():
        x = torch.zeros(4)
    assert version(x) is None and writes_to(x) is None


def test_a_compiled_graph_has_no_count():
    seen = []

    @torch.compile(fullgraph=True, backend="eager")
    def double(x):
        seen.append((version(x), writes_to(x)))
        return x * 2

    x = torch.zeros(4).add_(1)
    double(x)
    assert seen == [(None, None)]
