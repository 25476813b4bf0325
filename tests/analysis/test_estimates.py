import math

import pytest

from mxtrain.analysis.estimates import central_probability, estimate, paired_difference, t_quantile


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


@pytest.mark.parametrize(
    "confidence, degrees, expected",
    [  # printed tables of the distribution
        (0.95, 1, 12.7062), (0.95, 2, 4.3027), (0.95, 3, 3.1824), (0.95, 4, 2.7764), (0.95, 5, 2.5706),
        (0.95, 10, 2.2281), (0.95, 30, 2.0423), (0.95, 120, 1.9799), (0.99, 4, 4.6041), (0.90, 7, 1.8946),
        (0.50, 1, 1.0), (0.999, 9, 4.7809),
    ],
)  # fmt: skip
def test_quantiles_of_printed_tables(confidence, degrees, expected):
    t = t_quantile(confidence, degrees)
    assert t == pytest.approx(expected, abs=5e-5)
    assert central_probability(math.atan2(t, math.sqrt(degrees)), degrees) == pytest.approx(confidence, abs=1e-12)


def test_many_degrees_are_the_normal_distribution():
    assert central_probability(math.atan2(1.5, math.sqrt(100_000)), 100_000) == pytest.approx(
        math.erf(1.5 / math.sqrt(2)), abs=1e-5
    )


@pytest.mark.parametrize("confidence, degrees", [(0.0, 1), (1.0, 1), (0.95, 0)])
def test_what_has_no_quantile_is_an_error(confidence, degrees):
    with pytest.raises(ValueError, match="confidence"):
        t_quantile(confidence, degrees)
