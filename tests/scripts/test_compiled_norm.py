"""The benchmark of a norm in a compiled block on a CPU: every result is right, and every graph is one kernel."""

import compiled_norm
import pytest
import torch

# Inductor compiles for the CPU.
pytestmark = pytest.mark.sweep


def test_every_entry_is_fused_and_right(capsys):
    assert compiled_norm.main(["--check", "--shapes", "8x64"]) == 0
    assert capsys.readouterr().out.count("  ok") == 4


def test_another_operation_is_an_error():
    torch._dynamo.reset()
    inputs = torch.ones(4, 32), torch.ones(4, 32)
    with pytest.raises(RuntimeError, match="not fused: mxtrain.mxnorm_cast.default, aten.mul.Tensor"):
        compiled_norm.fused(lambda x, r: compiled_norm.norm_of_sum(x, r)[2] * 2, inputs)
