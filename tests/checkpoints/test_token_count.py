"""The count of tokens over changing numbers of ranks."""

import pytest

from mxtrain.checkpoints.token_count import TokenCount


@pytest.mark.parametrize("layouts", [[4, 2, 1, 4], [1, 3, 2], [8, 3, 5]])
def test_the_count_goes_on_over_other_numbers_of_ranks(layouts):
    """Three ranks cannot share evenly what eight have seen, nor two what three have seen."""
    total = 0
    for ranks in layouts:
        counts = [TokenCount(ranks, rank) for rank in range(ranks)]
        seen = [count.share(total) for count in counts]
        assert sum(seen) == total and max(seen) - min(seen) <= 1
        for _ in range(7):
            seen = [tokens + 17 for tokens in seen]
            total += 17 * ranks
            assert sum(seen) == total
            assert {count.of_all_ranks(tokens) for count, tokens in zip(counts, seen)} == {total}


def test_a_new_run_counts_from_zero():
    assert [TokenCount(3, rank).of_all_ranks(10) for rank in range(3)] == [30] * 3
