"""The tile of a matrix that one program of a norm and cast holds, by row length."""

from typing import NamedTuple

from mxtrain.kernels.integers import cdiv, next_power_of_2
from mxtrain.kernels.norm.row_lengths import MAX_PERSISTENT_COLUMNS


class RowTile(NamedTuple):
    """The part of the matrix that one program holds at a time.

    Attributes:
        persistent: the program holds whole rows. Otherwise it walks along them twice.
        rows: rows per program.
        parts: tensors that hold a row.
        columns: elements per row of one of them, a power of two.
        warps: warps per program.
    """

    persistent: bool
    rows: int
    parts: int
    columns: int
    warps: int


# (image, exact RMS) -> elements per thread at most. Much is computed once per thread, but an SM has registers for few
# such threads. With the exact RMS more threads are faster: 85 instead of 108 us at 16384 x 5120.
_ELEMENTS_PER_THREAD = {(False, False): 112, (False, True): 80, (True, False): 96, (True, True): 64}


def row_tile(columns: int, form: str, estimator: str) -> RowTile:
    """Return the tile for rows of ``columns`` elements, chosen by times on an H200.

    A row that fills five or six eighths of a power of two is held as five or three parts. 16384 rows of 5120 elements,
    cast to MXFP8 images, take 86 us like this, and 102 as a tile of 4096 and one of 1024. Seven parts are faster than
    one masked tile for NVFP4 codes only (11 %), and slower with the exact RMS (12 %).
    """
    if columns > MAX_PERSISTENT_COLUMNS:
        return RowTile(False, 1, 1, 8192, 8)
    image, exact = form == "image", estimator == "exact"
    filled = cdiv(columns, 32) * 32
    whole = next_power_of_2(filled)
    eighths = cdiv(filled * 8, whole)
    parts, part = {5: (5, whole // 8), 6: (3, whole // 4)}.get(eighths, (1, whole))
    elements = 2048 if parts == 1 else 512
    if image and exact:
        # 67 instead of 75 us at 65536 x 1024, 66 instead of 71 at 52224 x 1280.
        elements //= 2
        if parts == 1 and whole > 4096:
            # 70 instead of 81 us at 4096 x 16384, with a residual 136 instead of 172.
            parts, part = 2, whole // 2
    rows = max(1, elements // part)
    if parts == 1 and image:
        return RowTile(True, rows, parts, part, 8 if whole > 8192 else max(1, min(4, whole // 1024)))
    most = _ELEMENTS_PER_THREAD[image, exact]
    return RowTile(True, rows, parts, part, next_power_of_2(cdiv(rows * parts * part, 32 * most)))
