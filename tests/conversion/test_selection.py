import pytest

from mxtrain.conversion.selection import matches


@pytest.mark.parametrize(
    ("fqn", "pattern", "expected"),
    [
        ("layers.1.attention.wq", "layers.1", True),
        ("layers.10.attention.wq", "layers.1", False),
        ("layers.10.attention.wq", "layers.1*", True),
        ("layers.3.attention.wq", "layers.[0-3]", True),
        ("layers.3.attention.wq", "wq", True),
        ("layers.3.attention.wq", "w", False),
        ("layers.3.attention.wq", "attention.*", True),
        ("layers.3.attention", "attention.*", False),
        ("output", "out", False),
        ("output", "output", True),
    ],
)
def test_matches_whole_segments(fqn, pattern, expected):
    assert matches(fqn, pattern) is expected
