import pytest

from mxtrain import ConfigError
from mxtrain.conversion.selection import matches, selected


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


MODULES = ("embedding", "layers", *(f"layers.{i}{part}" for i in range(12) for part in ("", ".norm", ".wo")), "output")
NAMES = {**dict(zip(MODULES, MODULES)), "head": "output", "tower.0.wo": "layers.0.wo"}


def test_selected_modules_are_in_the_models_order():
    assert selected(NAMES, "layers.1", "filter_fqns") == ["layers.1", "layers.1.norm", "layers.1.wo"]
    assert selected(NAMES, "norm", "filter_fqns") == [f"layers.{i}.norm" for i in range(12)]
    assert selected(NAMES, "head", "filter_fqns") == ["output"], "a module is selected by any of its names"
    assert selected(NAMES, "wo", "filter_fqns") == [f"layers.{i}.wo" for i in range(12)], "and only once"
    with pytest.raises(ConfigError, match="^field: 'wq' matches no module; the top-level modules are: embedding, lay"):
        selected(NAMES, "wq", "field")
