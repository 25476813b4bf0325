"""NVFP4 casts of weights, whose tiles of 16 x 16 share a scale, against torchao where it has an equivalent.

The suite runs these once more with the other release of the supported range (marker ``torchao``).
"""

import pytest
import torch

from mxtrain.formats.nvfp4 import RANGE
from mxtrain.formats.nvfp4.reference import cast, dequantize, dynamic_tensor_scale
from tests.support.nvfp4_blocks import draw, same_bits, torchao_cast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_and_its_transpose_have_the_same_values(dtype):
    w = (draw(48, 80) * draw(48, 1, seed=1).exp()).to(dtype)
    tensor_scale = dynamic_tensor_scale(w)
    values = dequantize(*cast(w, tensor_scale, tiles=True), tensor_scale)
    transposed = dequantize(*cast(w.t(), tensor_scale, tiles=True), tensor_scale)
    assert torch.equal(values.t(), transposed)
    assert not torch.equal(dequantize(*cast(w, tensor_scale)).t(), dequantize(*cast(w.t(), tensor_scale)))


def test_a_tile_shares_the_scale_of_its_largest_element():
    w = draw(32, 48)
    codes, scales = cast(w, 2.0**-6, tiles=True)
    assert codes.shape == (32, 24) and scales.shape == (32, 3)
    tiles = w.reshape(2, 16, 3, 16).transpose(1, 2).reshape(6, 256)
    top = tiles.gather(1, tiles.abs().argmax(1, keepdim=True)).expand(6, 16)
    _, expected = torchao_cast(top.contiguous(), 2.0**-6)
    assert torch.equal(scales.float().reshape(2, 16, 3), expected.float().reshape(2, 1, 3).expand(2, 16, 3))


def test_tiles_whose_blocks_all_have_the_tiles_maximum_cast_like_torchao():
    w = draw(32, 64).clamp(-2, 2)
    w[:, ::16] = 2.0 * draw(32, 4, seed=1).sign()
    w[16:] *= 0.003
    for tensor_scale in (dynamic_tensor_scale(w), 2.0**-8):
        for ours, theirs in zip(cast(w, tensor_scale, tiles=True), torchao_cast(w, tensor_scale)):
            assert same_bits(ours, theirs)


@pytest.mark.parametrize("exponent", [-20, -3, 0, 5])
def test_under_a_power_of_two_tiles_have_the_bits_of_torchaos_training_kernel(exponent):
    """torchao 0.18's ``triton_weight_quantize_2d``, which needs Blackwell, in the order of operations it documents.

    It is given the tensor's amax and rounds 2688 / amax; where that is a power of two, no rounding differs.
    """
    from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4

    amax = torch.tensor(RANGE * 2.0**exponent)
    w = draw(32, 64, seed=exponent + 40) * draw(32, 1, seed=3).exp() * 2.0 ** (exponent + 5)
    w[0, 0] = amax
    encode = RANGE / amax
    decode = 1.0 / encode
    largest = w.reshape(2, 16, 4, 16).abs().amax((1, 3))
    scales = ((largest / 6) * encode).clamp(2.0**-6, 448).to(torch.float8_e4m3fn).float()
    factor = (1.0 / (scales * decode)).repeat_interleave(16, 0).repeat_interleave(16, 1)
    scaled = (w * factor).clamp(-6, 6)
    codes, tile_scales = cast(w, dynamic_tensor_scale(w), tiles=True)
    assert torch.equal(tile_scales.float(), scales.repeat_interleave(16, 0))
    assert torch.equal(codes, pack_uint4(f32_to_f4_unpacked(scaled)))


def test_zeros_pad_an_incomplete_tile():
    w = draw(40, 32)
    full = cast(torch.cat([w, torch.zeros(8, 32)]), 2.0**-8, tiles=True)
    for part, whole in zip(cast(w, 2.0**-8, tiles=True), full):
        assert same_bits(part, whole[:40])
