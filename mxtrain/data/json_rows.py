"""Reads JSON Lines row by row, and JSON arrays of rows.

Every row is taken as it is written. The ``datasets`` library infers one type for each column from the start of a file:
it refuses a column that has another type later, and turns texts that look like dates into dates.
"""

from collections.abc import Iterator
from typing import TextIO

from mxtrain.json_toml import parse

BYTE_ORDER_MARK = "\ufeff"


def json_rows(file: TextIO) -> Iterator[dict]:
    """Yield the rows in ``file``: one JSON object per line, or an array of objects, which is read whole.

    Raises ValueError for text that is neither, with its place.
    """
    is_first = True
    for number, line in enumerate(file, start=1):
        line = line.lstrip(BYTE_ORDER_MARK).strip()
        if not line:
            continue
        if is_first and line.startswith("["):
            for row_number, row in enumerate(parse(line + file.read()), start=1):
                yield _checked(row, f"row {row_number}")
            return
        is_first = False
        try:
            row = parse(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        yield _checked(row, f"line {number}")


def _checked(row: object, place: str) -> dict:
    if not isinstance(row, dict):
        raise ValueError(f"{place} is a JSON {type(row).__name__}, not an object with a text")
    return row
