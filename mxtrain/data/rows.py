"""Takes the text out of the rows of a table, and counts the rows without text."""

from mxtrain.errors import ConfigError

WITHOUT_TEXT = "without text"
"""Reason for leaving out a row: the text column is missing, null or not a string"""


class TextColumn:
    """The column ``text_key`` of rows, which are dicts.

    A few bad rows are common in large data, so they are counted. Data without any text are an error.
    """

    def __init__(self, text_key: str):
        self.text_key = text_key
        self.without_text = 0
        self._first_problem = ""
        self._has_text = False

    def text_of(self, row: dict, where: str) -> str | None:
        """Return the text of a row, or None if it has none. ``where`` names the row's file or dataset."""
        text = row.get(self.text_key)
        if isinstance(text, str):
            self._has_text = True
            return text
        self.without_text += 1
        self._first_problem = self._first_problem or self._problem(row, where)
        return None

    def require_text(self) -> None:
        """Raise ConfigError if there were rows, and none of them had text."""
        if self.without_text and not self._has_text:
            raise ConfigError(self._first_problem)

    def _problem(self, row: dict, where: str) -> str:
        setting = f"data.text_key = {self.text_key!r}"
        if self.text_key not in row:
            return f"{setting} is not a column of {where}, which has: {', '.join(map(str, row))}"
        kind = "only null" if row[self.text_key] is None else type(row[self.text_key]).__name__
        return f"{setting} in {where} holds {kind}, not text"
