import pytest

from mxtrain.data.rows import TextColumn
from mxtrain.errors import ConfigError


def test_rows_without_text_are_counted():
    column = TextColumn("text")
    rows = [{"text": "a"}, {"text": None}, {"id": 1}, {"text": 3}, {"text": ""}]
    assert [column.text_of(row, "a.jsonl") for row in rows] == ["a", None, None, None, ""]
    assert column.without_text == 3
    column.require_text()


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"id": 1, "body": "a"}, {"text": 3}], "is not a column of a.jsonl, which has: id, body"),
        ([{"text": 3}, {"id": 1}], "in a.jsonl holds int, not text"),
        ([{"text": None}], "in a.jsonl holds only null, not text"),
    ],
)
def test_no_text_at_all_is_an_error_about_the_first_row(rows, message):
    column = TextColumn("text")
    column.require_text()  # no rows are no error here: the caller knows what that means
    for row in rows:
        column.text_of(row, "a.jsonl")
    with pytest.raises(ConfigError, match=f"^data.text_key = 'text' {message}$"):
        column.require_text()
