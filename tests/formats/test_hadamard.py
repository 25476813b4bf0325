import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.formats.hadamard import along_tokens, hadamard, pad, unpack_signs
from mxtrain.rng.seeds import hadamard_signs, sign_mask

INF, NAN = float("inf"), float("nan")
ONES, FIXED = (1,) * 16, (1,) * 32
SIGNS = hadamard_signs(0, "layers.0.attention.wq")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def matrix(signs) -> torch.Tensor:
    """H diag(signs) / sqrt(n) in fp64, built by Sylvester's recursion."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < len(signs):
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h * torch.tensor(signs) / len(signs) ** 0.5


def step_by_step(block, signs):
    """The order of operations in the module's docstring, one fp32 number at a time."""
    n = len(signs)
    y = [np.float32(value) * np.float32(sign / n) for value, sign in zip(block, signs)]
    for distance in (1, 2, 4, 8, 16)[: n.bit_length() - 1]:
        for i in range(n):
            if not i & distance:
                y[i], y[i + distance] = y[i] + y[i + distance], y[i] - y[i + distance]
    return [value * np.float32(n**0.5) for value in y]


@pytest.mark.parametrize("signs", [SIGNS, FIXED], ids=len)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_every_block_is_multiplied_by_the_matrix(dim, signs):
    x = draw(64, 96, 32, dtype=torch.float64)
    blocks = x.movedim(dim, -1).reshape(-1, len(signs))
    want = (blocks @ matrix(signs).t()).reshape(x.movedim(dim, -1).shape).movedim(-1, dim)
    for dtype, error in ((torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        got = hadamard(x.to(dtype), signs, dim)
        assert got.shape == x.shape and got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=8 * error)


def test_the_matrix_is_orthonormal():
    eye = hadamard(torch.eye(16), SIGNS, 0)
    assert torch.equal(eye.double(), matrix(SIGNS))
    assert torch.equal(eye.t() @ eye, torch.eye(16))


@pytest.mark.parametrize("signs", [SIGNS, FIXED], ids=len)
@pytest.mark.parametrize("scale", [1.0, 2.0**-148, 2.0**-126, 2.0**100])
def test_the_order_of_operations_is_the_stated_one(scale, signs):
    x = draw(20, len(signs), seed=1)
    x[::2] *= 2.0 ** torch.randint(-20, 20, (10, len(signs)), generator=torch.Generator().manual_seed(2))
    x = x * scale
    want = torch.from_numpy(np.array([step_by_step(block.numpy(), signs) for block in x]))
    assert torch.equal(hadamard(x, signs, 1).view(torch.int32), want.view(torch.int32))


def test_the_matrix_is_torchaos():
    """torchao 0.17 has no such function."""
    utils = pytest.importorskip("torchao.prototype.moe_training.nvfp4_training.hadamard_utils")
    want = draw(8, 16) @ utils.get_rht_matrix(SIGNS, "cpu", torch.float32, 16)
    torch.testing.assert_close(hadamard(draw(8, 16), SIGNS, 1), want, rtol=0, atol=2e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2**16 - 1), st.integers(0, 2**32))
def test_the_transform_leaves_products_unchanged(blocks, sign_bits, seed):
    """Exactly: with small integers no operation rounds."""
    generator = torch.Generator().manual_seed(seed)
    dy, x = (torch.randint(-64, 65, (16 * blocks, n), generator=generator).float() for n in (5, 3))
    signs = tuple(1 - 2 * (sign_bits >> i & 1) for i in range(16))
    assert torch.equal(hadamard(dy, signs, 0).t() @ hadamard(x, signs, 0), dy.t() @ x)


def test_the_largest_and_the_smallest_numbers():
    largest = torch.finfo(torch.float32).max
    y = hadamard(torch.full((1, 16), largest), ONES, 1)
    assert y[0, 0] == INF and not y[0, 1:].any(), "4 times as large as any fp32 number, and zeros instead of NaN"
    x = largest * torch.tensor([1.0, -1.0] * 8)[None]
    assert not hadamard(x * torch.tensor(SIGNS) / 4, SIGNS, 1).isinf().any()
    for smallest in (torch.tensor(1, dtype=torch.int16).view(torch.bfloat16), torch.tensor(2.0**-133)):
        y = hadamard(torch.nn.functional.pad(smallest[None], (0, 15))[None], SIGNS, 1)
        assert (y.abs() == 2.0**-135).all(), "the smallest bf16 number loses nothing"


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17])
def test_padding_tokens_leaves_products_unchanged(tokens):
    dy, x = draw(tokens, 4, dtype=torch.float64), draw(tokens, 3, seed=1, dtype=torch.float64)
    padded = pad(dy)
    assert padded.shape == (-(-tokens // 16) * 16, 4) and torch.equal(padded[:tokens], dy)
    assert not padded[tokens:].any() and padded.dtype == dy.dtype
    assert (padded is dy) == (tokens % 16 == 0)
    got = hadamard(padded, SIGNS, 0).t() @ hadamard(pad(x), SIGNS, 0)
    torch.testing.assert_close(got, dy.t() @ x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_a_fixed_transform_of_tokens_without_signs(tokens):
    x, dy = draw(tokens, 3, dtype=torch.float64), draw(tokens, 5, seed=1, dtype=torch.float64)
    got = along_tokens(x, None)
    assert torch.equal(got, hadamard(pad(x, 32), FIXED, 0)) and len(got) == -(-tokens // 32) * 32
    torch.testing.assert_close(along_tokens(dy, None).t() @ got, dy.t() @ x, rtol=0, atol=1e-13)


def test_signs_as_a_tensor():
    signs = unpack_signs(torch.tensor(sign_mask(SIGNS)))
    assert signs.dtype == torch.float32 and tuple(signs.tolist()) == SIGNS
    x = draw(32, 16)
    assert torch.equal(hadamard(x, signs, 0), hadamard(x, SIGNS, 0))
    assert torch.equal(hadamard(x.double(), signs, 1), hadamard(x.double(), SIGNS, 1))


def test_compiled(device, compile_backend):
    x = draw(32, 16).to(device)
    compiled = torch.compile(hadamard, fullgraph=True, backend=compile_backend)
    torch.testing.assert_close(compiled(x, SIGNS, 0), hadamard(x, SIGNS, 0), rtol=0, atol=1e-6)
