"""Lines about settings that a run is too short for, or lacks what they need."""

from mxtrain.settings.mxnorm_section import without_effect
from mxtrain.settings.read import read_settings

SCHEDULE = '--mxnorm.schedule={from_step = 2, recipe = "dgrad=bf16"}'
NVFP4 = ["--mxnorm.recipe=nvfp4"]


def test_what_has_no_effect_is_said():
    for flags, begin in (
        ([], None),
        (["--mxnorm.diagnostics.every=11"], "mxnorm.diagnostics.every = 11 measures nothing in 10 steps; lower it"),
        (["--mxnorm.diagnostics.every=10"], None),
        (["--mxnorm.diagnostics.every=2", "--model.converters="], "mxnorm.diagnostics.every has no effect without"),
        (
            [*NVFP4, "--mxnorm.four_over_six=both"],
            "mxnorm.four_over_six changes at most 4 %",
        ),
        (
            ["--mxnorm.recipe=nvfp4_4over6", "--mxnorm.weight_tiles"],
            "mxnorm.four_over_six changes at most 4 %",
        ),
        (["--mxnorm.mode=fp8_merged"], None),
        (["--mxnorm.mode=fp8_merged", "--model.converters="], None),
        (["--mxnorm.mode=fp8_merged", "--training.steps=50"], None),
        (["--mxnorm.mode=fp8_merged", "--mxnorm.diagnostics.every=0"], "mxnorm.merge_limit has no effect with mxnorm."),
        (
            ["--mxnorm.mode=fp8_merged", "--training.steps=50", "--mxnorm.diagnostics.fqns=wo"],
            "mxnorm.merge_limit watches only the layers of mxnorm.diagnostics.fqns",
        ),
        (["--mxnorm.mode=fp8_merged", "--mxnorm.diagnostics.every=2"], None),
        ([*NVFP4, "--mxnorm.four_over_six=both", "--mxnorm.weight_tiles=False"], None),
        ([*NVFP4, "--mxnorm.four_over_six=activations"], None),
        (["--model.converters=", SCHEDULE], "mxnorm.schedule has no effect without the converter"),
    ):
        settings = read_settings(["--job.config_file=llama3_debug", "--training.steps=10", *flags])
        lines = list(without_effect(settings.values))
        assert len(lines) == (begin is not None) and all(line.startswith(begin) for line in lines), lines
