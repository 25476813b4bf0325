"""Context parallelism: what is counted."""

import pytest

from mxtrain.analysis import load_run
from tests.support import oracle, sharded_runs


@pytest.mark.parametrize("name, of_one", [("cp 2, validated, mxfp8", "validated"), ("qwen3, cp 2", "qwen3")])
def test_rows_and_validation_are_those_of_one_process(base, name, of_one):
    found, expected = sharded_runs.on_two(base)[name], oracle.outcomes_of_one(base)[of_one]
    assert [row["tokens_seen"] for row in found.rows] == [row["tokens_seen"] for row in expected.rows]
    for row, expected_row in zip(found.rows, expected.rows, strict=True):
        assert row["loss"] == pytest.approx(expected_row["loss"], rel=1e-3)
        # The larger of two halves' losses.
        assert row["loss"] < row["max_loss"] < 1.1 * row["loss"]
    validation = [[row["validation_loss"] for row in load_run(run.folder).validation] for run in (found, expected)]
    assert len(validation[0]) == 2 and validation[0] == pytest.approx(validation[1], rel=1e-3)


def test_a_run_goes_on_on_one_process_with_the_same_text_and_token_count(base):
    rows, expected = sharded_runs.resumed_on_one(base).rows, oracle.outcomes_of_one(base)["validated"].rows
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["tokens_seen"] for row in rows] == [row["tokens_seen"] for row in expected]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=5e-3)
