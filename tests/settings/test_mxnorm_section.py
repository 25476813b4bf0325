"""Lines about settings without what they need."""

from mxtrain.settings.mxnorm_section import without_effect
from mxtrain.settings.read import read_settings

SCHEDULE = '--mxnorm.schedule={from_step = 2, recipe = "dgrad=bf16"}'


def test_what_has_no_effect_is_said():
    for flags, begin in (
        ([], None),
        (["--mxnorm.diagnostics.every=10"], None),
        (["--mxnorm.diagnostics.every=2", "--model.converters="], "mxnorm.diagnostics.every has no effect without"),
        (["--mxnorm.mode=fp8_merged"], "mxnorm.merge_limit has no effect without mxnorm.diagnostics.every"),
        (["--mxnorm.mode=fp8_merged", "--mxnorm.diagnostics.every=2"], None),
        (["--model.converters=", SCHEDULE], "mxnorm.schedule has no effect without the converter"),
    ):
        settings = read_settings(["--job.config_file=llama3_debug", "--training.steps=10", *flags])
        lines = list(without_effect(settings.values))
        assert len(lines) == (begin is not None) and all(line.startswith(begin) for line in lines), lines
