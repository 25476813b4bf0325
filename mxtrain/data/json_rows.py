"""Reads JSON Lines row by row, and JSON arrays of rows.

Every row is taken as it is written. The ``datasets`` library infers one type for each column from the start of a file:
it refuses a column that has another type later, and turns texts that look like dates into dates.
"""

import json
from collections.abc import Iterator
from typing import TextIO

BYTE_ORDER_MARK = "\ufeff"


def json_rows(file: TextIO) -> Iterator[dict]:
    """Yield the rows in ``file``: one JSON object per line, or an array of objects, which is read whole.

    Raises ValueError for text that is neither, with its place.
    """
    for number, line in enumerate(file, start=1):
        line = line.lstrip(BYTE_ORDER_MARK).strip()
        if not line:
            continue
        if number == 1 and line.startswith("["):
            yield from _checked(json.loads(line + file.read()), "row")
            return
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        yield from _checked([row], "line", number)


def _checked(rows: list, what: str, first: int = 1) -> Iterator[dict]:
    for number, row in enumerate(rows, start=first):
        if not isinstance(row, dict):
            raise ValueError(f"{what} {number} is a JSON {type(row).__name__}, not an object with a text")
        yield row
