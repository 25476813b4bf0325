import pytest
import torch

from mxtrain.rng.philox import philox, rounding_bits, rounding_words
from mxtrain.rng.seeds import rounding_key

KEY = rounding_key(0, "layers.0.attention.wq")


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter, key, want):
    """From ``kat_vectors``, distributed with Random123."""
    low, high = words(key)
    assert list(philox(low | high << 32, *words(counter))) == words(want)
    tensors = [torch.tensor([word]) for word in words(counter)]
    assert [word.item() for word in philox(low | high << 32, *tensors)] == words(want)


def test_the_addressing_rule():
    rows, columns, step, rank, microbatch = 5, 7, 11, 13, 17
    bits = rounding_words(rows, columns, KEY, step, rank, microbatch)
    assert bits.shape == (rows, columns) and bits.dtype == torch.int64
    for row in range(rows):
        for column in range(columns):
            e = row * columns + column
            assert bits[row, column].item() == philox(KEY, e // 4, microbatch, step, rank)[e % 4]


def test_added_rows_do_not_change_the_others():
    assert torch.equal(rounding_words(32, 48, KEY, 1, 0)[:19], rounding_words(19, 48, KEY, 1, 0))


def test_every_address_has_bits_of_its_own():
    """Each address has 4096 words. Two addresses with the same counter would share all of them."""
    other_keys = [rounding_key(0, "layers.0.attention.wk"), rounding_key(1, "layers.0.attention.wq")]
    addresses = [(KEY, 1, 1, 1), (KEY, 2, 1, 1), (KEY, 1, 2, 1), (KEY, 1, 1, 2), *((k, 1, 1, 1) for k in other_keys)]
    drawn = [rounding_words(64, 64, *address) for address in addresses]
    assert torch.cat(drawn).unique().numel() > 0.9999 * len(addresses) * 4096
    assert torch.equal(rounding_words(64, 64, *addresses[0]), drawn[0])


def test_key_and_counter_as_tensors():
    for words in ((KEY, 3, 1, 2), (2**63 - 1, 2**32 - 1, 0, 2**32 - 1)):
        assert torch.equal(rounding_words(8, 6, *map(torch.tensor, words)), rounding_words(8, 6, *words))


def test_no_elements():
    assert rounding_words(0, 16, KEY, 0, 0).shape == (0, 16)


def test_compiled(device, compile_backend):
    if device == "cuda":  # kernels draw there
        pytest.skip("Inductor (2.11 to 2.14) folds the factors into an index of int32, which Triton refuses")
    compiled = torch.compile(rounding_words, fullgraph=True, backend=compile_backend)
    for step in (3, 4):
        got = compiled(8, 16, KEY, torch.tensor(step, device=device), 1, device=device)
        assert torch.equal(got, rounding_words(8, 16, KEY, step, 1, device=device))


def test_bits_for_the_two_casts_of_a_gradient_are_the_halves_of_a_word():
    words = rounding_words(256, 256, KEY, 3, 0)
    by_dim = [rounding_bits(words, dim) for dim in (0, 1)]
    assert torch.equal(by_dim[0] << 16 | by_dim[1], words)
    assert all(bits.min() >= 0 and bits.max() < 2**16 for bits in by_dim)
    a, b = (bits.double() / 2**16 - 0.5 for bits in by_dim)
    assert abs((a * b).mean()) < 3 / (12 * words.numel() ** 0.5), "uncorrelated"
