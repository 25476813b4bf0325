import pytest

from mxtrain.analysis.estimates import estimate, paired_difference


def test_a_mean_its_standard_error_and_its_interval_by_hand():
    found = estimate([1.0, 2.0, 4.0, 5.0])  # deviations -2, -1, 1, 2: variance 10/3
    assert (found.mean, found.count) == (3.0, 4)
    assert found.error == pytest.approx((10 / 3 / 4) ** 0.5)
    assert found.half_width == pytest.approx(3.182446 * 0.9128709, rel=1e-6)


def test_one_value_has_no_error_and_no_interval_and_no_value_no_mean():
    one = estimate([2.5])
    assert (one.mean, one.count, one.error, one.half_width) == (2.5, 1, None, None)
    assert estimate([]) is None


def test_a_paired_difference_takes_the_seeds_that_both_have():
    p2 = {0: 2.551, 1: 2.524, 7: 9.0}
    found = paired_difference(p2, {0: 2.570, 1: 2.518, 8: 1.0})  # -0.019 and +0.006
    assert found.count == 2
    assert found.mean == pytest.approx(-0.0065)
    assert found.error == pytest.approx(0.0125)  # half the distance of two values
    assert found.half_width == pytest.approx(12.7062047 * 0.0125)
    assert paired_difference(p2, {3: 1.0}) is None
