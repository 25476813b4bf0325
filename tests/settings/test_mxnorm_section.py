"""Lines about settings that a run is too short for, or lacks what they need."""

import pytest

from mxtrain.settings.mxnorm_section import without_effect
from mxtrain.titan.job_config import parse_job_config

NOT_MEASURED = "nothing is measured: mxnorm.diagnostics.every = 11"
SCHEDULE = '--mxnorm.schedule={from_step = 2, recipe = "dgrad=bf16"}'
WITHOUT_CONVERTER = ["--mxnorm.diagnostics.every=2", "--model.converters="]


@pytest.mark.parametrize(
    ("steps", "flags", "begins"),
    [
        (10, [], []),
        (10, ["--checkpoint.interval=10"], ["no step of this run is saved: checkpoint.interval = 10 has no effect"]),
        (10, ["--checkpoint.interval=10", "--checkpoint.enable"], []),
        (10, ["--mxnorm.diagnostics.every=11"], [f"{NOT_MEASURED}, and the run has 10 steps"]),
        (11, ["--mxnorm.diagnostics.every=11"], []),
        (10, WITHOUT_CONVERTER, ["mxnorm.diagnostics.every has no effect without the converter"]),
        (10, ["--model.converters=", SCHEDULE], ["mxnorm.schedule has no effect without the converter"]),
    ],
)
def test_what_has_no_effect_is_said(steps, flags, begins):
    job_config = parse_job_config(["--job.config_file=llama3_debug", f"--training.steps={steps}", *flags])
    lines = list(without_effect(job_config))
    assert len(lines) == len(begins) and all(line.startswith(begin) for line, begin in zip(lines, begins))
