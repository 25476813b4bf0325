import math

import pytest

from mxtrain.analysis.student_t import central_probability, t_quantile


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
