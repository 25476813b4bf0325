import pytest

from mxtrain.data import documents
from mxtrain.data.documents import TICK_SECONDS, Progress, TextColumn, fraction, is_held_out
from mxtrain.errors import ConfigError

KEYS = [f"stdlib/module_{i}.py" for i in range(4000)]


def test_fraction_is_the_same_on_every_machine():
    # Fixed values: another hash would move documents between training and validation of published runs.
    assert fraction("stdlib/json/decoder.py", "validation") == 0.8746483661446574
    held_out = [key for key in KEYS[:50] if is_held_out(key, 0.05)]
    assert held_out == [f"stdlib/module_{number}.py" for number in (27, 30, 33, 45, 49)]


def test_fractions_are_uniform_and_independent_across_salts():
    first, second = ([fraction(key, salt) for key in KEYS] for salt in ("validation", "tokenizer"))
    for numbers in (first, second):
        assert abs(sum(numbers) / len(KEYS) - 0.5) < 0.02
    both = sum(a < 0.5 and b < 0.5 for a, b in zip(first, second, strict=True))
    assert abs(both / len(KEYS) - 0.25) < 0.03


def test_a_larger_validation_share_contains_a_smaller_one():
    small, large = ({key for key in KEYS if is_held_out(key, share)} for share in (0.1, 0.2))
    assert abs(len(small) / len(KEYS) - 0.1) < 0.02
    assert small < large
    assert not any(is_held_out(key, 0.0) for key in KEYS)


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


def test_ticks_are_throttled_but_other_lines_are_not(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(documents.time, "monotonic", lambda: now[0])
    assert TICK_SECONDS == 2.0
    reporter = Progress(lines.append)
    for second in range(10):
        now[0] = second / 2
        reporter.tick(lambda second=second: f"tick {second}")
    assert lines == ["tick 4", "tick 8"]
    reporter.say("a")
    reporter.say("b")
    now[0] += 1.0
    reporter.tick(lambda: "too soon after another line")
    assert lines[2:] == ["a", "b"]
