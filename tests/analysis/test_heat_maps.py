import matplotlib.image
import numpy as np
import pytest

from mxtrain.analysis import MetricsWriter
from mxtrain.analysis.heat_maps import draw_numerics, remarks
from mxtrain.errors import ConfigError


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    writer = MetricsWriter(folder / "metrics.jsonl")
    for row in rows:
        writer.write(row)
    writer.close()


def row(step, r2, ratio=5.0):
    key = "numerics/layers.{}.ffn_norm/rms_r2"
    return {
        "step": step,
        **{key.format(layer): value for layer, value in enumerate(r2)},
        "numerics/layers.0.feed_forward.w1/grad_norm_to_noise": ratio,
        "numerics/layers.0.feed_forward.w1/fprop_input_sqnr_db": 31.0,
    }


def test_the_picture_shows_values_and_marks(tmp_path):
    """Two runs that differ in one value give pictures that differ: in its cell, its scale of colors and its cross."""
    pixels = []
    for name, last in (("a", 0.99), ("b", 0.5)):
        write(tmp_path / name, [row(10, [0.98, 0.99]), row(20, [0.98, last])])
        path, lines = draw_numerics(tmp_path / name, tmp_path / name / "numerics.png")
        pixels.append(matplotlib.image.imread(path))
        assert len(lines) == (name == "b")
    assert lines == ["step 20: r² of estimated and true RMS is below 0.95 in 1 of 2 modules; layers.1.ffn_norm: 0.5"]
    assert pixels[0].shape == pixels[1].shape and np.abs(pixels[0] - pixels[1]).max() > 0.5


def test_remarks_name_the_worst_module():
    values = {"grad_norm_to_noise": {"a": {5: 1.6}, "b": {5: 1.2}, "c": {5: 9.0}}, "rms_r2": {"d": {4: 0.1}}}
    title = "weight gradient: norm / quantization noise"
    assert remarks(values, 5) == [f"step 5: {title} is below 1.73 in 2 of 3 modules; b: 1.2"]


def test_a_run_without_figures_and_a_wrong_name_are_errors(tmp_path):
    write(tmp_path / "a", [{"step": 1, "loss": 2.0}])
    with pytest.raises(ConfigError, match="has no figures: train with mxnorm.diagnostics.every = 50"):
        draw_numerics(tmp_path / "a", tmp_path / "a.png")
    with pytest.raises(ConfigError, match="is not the name of a PNG file"):
        draw_numerics(tmp_path / "a", tmp_path / "a.pdf")
    with pytest.raises(ConfigError, match="does not exist"):
        draw_numerics(tmp_path / "b", tmp_path / "a.png")
