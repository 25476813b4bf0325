"""The tiles of norm and cast, for every row length that registers hold."""

import pytest

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.mxnorm.row_tile import RowTile, row_tile
from mxtrain.kernels.norm.row_lengths import MAX_PERSISTENT_COLUMNS


@pytest.mark.parametrize("estimator", ["pre_round", "post_round", "exact"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_fit_in_registers(form, estimator):
    """Triton's interpreter has no limit on elements per thread."""
    for columns in range(16, MAX_PERSISTENT_COLUMNS + 1, 16):
        persistent, rows, parts, part, warps = row_tile(columns, form, estimator)
        assert persistent and parts in (1, 2, 3, 5) and warps in (1, 2, 4, 8), columns
        assert part % 32 == 0 and part & (part - 1) == 0, columns
        filled = -columns // 32 * -32
        assert columns <= parts * part <= filled * 4 // 3, columns
        assert rows * parts * part <= 112 * 32 * warps, columns


@pytest.mark.parametrize("form", ["codes", "blocked"])
def test_every_thread_has_a_block_of_codes(form):
    """A thread has whole blocks of NVFP4, of which it stores the scale."""
    for columns in range(256, MAX_PERSISTENT_COLUMNS + 1, 16):
        tile = row_tile(columns, form, "pre_round")
        assert tile.rows * tile.columns // 16 >= 32 * tile.warps, columns


def test_rows_that_fill_five_or_six_eighths_are_parts():
    assert row_tile(5120, "image", "pre_round") == RowTile(True, 1, 5, 1024, 2)
    assert row_tile(5120, "image", "exact") == RowTile(True, 1, 5, 1024, 4)
    assert row_tile(768, "codes", "pre_round") == RowTile(True, 2, 3, 256, 1)
    assert row_tile(7168, "image", "pre_round") == RowTile(True, 1, 1, 8192, 4)
    assert not row_tile(MAX_PERSISTENT_COLUMNS + 32, "image", "exact").persistent


def test_the_exact_rms_has_smaller_tiles_of_images():
    assert row_tile(16384, "image", "pre_round") == RowTile(True, 1, 1, 16384, 8)
    assert row_tile(16384, "image", "exact") == RowTile(True, 1, 2, 8192, 8)
    assert row_tile(1024, "image", "pre_round") == RowTile(True, 2, 1, 1024, 1)
    assert row_tile(1024, "image", "exact") == RowTile(True, 1, 1, 1024, 1)
    assert row_tile(6144, "codes", "pre_round") == RowTile(True, 1, 3, 2048, 2)
    assert row_tile(6144, "codes", "exact") == RowTile(True, 1, 3, 2048, 4)
