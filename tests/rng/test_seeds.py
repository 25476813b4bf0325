import os
import subprocess
import sys

import numpy as np
import pytest

from mxtrain.rng.seeds import hadamard_signs, rounding_key, sign_mask, weight_seed

FQNS = [f"layers.{i}.{name}" for i in range(32) for name in ("attention.wq", "attention.wo", "feed_forward.w2")]


def test_numbers_do_not_change_between_releases():
    """A run that resumes with a newer release keeps its numbers."""
    assert hadamard_signs(42, "layers.0.attention.wq") == (1, 1, -1, -1, 1, -1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1)
    assert rounding_key(42, "layers.0.attention.wq") == 2898033203299009445
    assert weight_seed(42, "layers.0.attention.wq.weight", 0) == 8144521460818962419


def test_numbers_are_the_same_in_another_process():
    code = "from mxtrain.rng.seeds import *; print(hadamard_signs(7, 'a.b'), rounding_key(7, 'a.b'))"
    want = f"{hadamard_signs(7, 'a.b')} {rounding_key(7, 'a.b')}"
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == want


def test_signs_are_plus_or_minus_one_in_equal_shares():
    signs = [hadamard_signs(seed, fqn) for seed in range(20) for fqn in FQNS]
    assert all(len(s) == 16 and set(s) <= {1, -1} and all(type(sign) is int for sign in s) for s in signs)
    # Three standard deviations of the sum of that many signs, at every position of the 16.
    assert all(abs(sum(position)) < 3 * len(signs) ** 0.5 for position in zip(*signs))


def test_sign_mask():
    assert sign_mask((1,) * 16) == 0 and sign_mask((-1,) + (1,) * 15) == 1 and sign_mask((1,) * 15 + (-1,)) == 2**15
    masks = {sign_mask(hadamard_signs(0, fqn)) for fqn in FQNS}
    assert len(masks) == len({hadamard_signs(0, fqn) for fqn in FQNS})


def test_every_layer_and_seed_has_a_key_of_its_own():
    keys = [rounding_key(seed, fqn) for seed in (-1, 0, 1, 2**64) for fqn in FQNS]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
    assert len({hadamard_signs(0, fqn) for fqn in FQNS}) > 90, "of 96, all but a few by chance"
    assert rounding_key(1, "1.w") != rounding_key(11, ".w")


def test_every_draw_of_every_parameter_has_a_seed_of_its_own():
    names = ["", "1", "1:w", *FQNS]
    seeds = {weight_seed(seed, fqn, draw) for seed in (0, 1, 11) for fqn in names for draw in (0, 1, 11)}
    assert len(seeds) == 9 * len(names)
    assert all(0 <= seed < 2**64 for seed in seeds)
    # A CPU generator takes 32 bits of its seed.
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)


def test_numpy_integers_are_seeds():
    assert rounding_key(np.int64(42), "w") == rounding_key(42, "w")


def test_bad_input():
    for seed in (None, 1.0, True, np.True_, "1"):
        with pytest.raises(ValueError, match="is not an integer"):
            weight_seed(seed, "w", 0)
        with pytest.raises(ValueError, match="is not an integer"):
            hadamard_signs(seed, "w")
        with pytest.raises(ValueError, match="is not an integer"):
            rounding_key(seed, "w")
