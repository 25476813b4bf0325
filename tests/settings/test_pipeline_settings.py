"""Pipelines that cannot work, or would train another model."""

import json

import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.pipeline import SCHEDULES, stages_problem
from mxtrain.settings.read import read_settings

PP, SCHEDULE, CHUNK, PER_STAGE, PARTS = (
    f"--parallelism.{name}"
    for name in (
        "pipeline_parallel_degree",
        "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size",
        "pipeline_parallel_layers_per_stage",
        "module_fqns_per_model_part",
    )
)
BATCH, VALIDATION = "--training.local_batch_size", "--validation.enable --validation.local_batch_size"


def settings(*flags: str):
    return read_settings([word for flag in flags for word in flag.split()])


def check(*flags: str) -> None:
    check_machine(settings(*flags), Machine(4, has_gpus=False))


@pytest.mark.parametrize(
    "flags",
    [
        *(f"{PP}=4 {BATCH}=8 {SCHEDULE}={schedule}" for schedule in SCHEDULES),
        f"{PP}=4 {BATCH}=8 {CHUNK}=2",
        f"{PP}=4 {BATCH}=3 {SCHEDULE}=Interleaved1F1B",
        f"{PP}=4 {BATCH}=8 {VALIDATION}=16",
        f"{BATCH}=3 {CHUNK}=2 {SCHEDULE}=ZBVZeroBubble",
    ],
)
def test_pipelines_that_fit(flags):
    check(flags)


@pytest.mark.parametrize(
    "flags, message",
    [
        *(
            (
                f"{PP}=4 {BATCH}=8 {SCHEDULE}={schedule}",
                f"parallelism.pipeline_parallel_schedule = '{schedule}' {reason}: allowed are 1F1B, GPipe, Interleaved",
            )
            for schedule, reason in {
                "InterleavedZeroBubble": "runs the backward of every layer twice",
                "ZBVZeroBubble": "runs the backward of every layer twice",
                "DualPipeV": "runs the backward of every layer twice",
                "PipelineScheduleMulti": "is not supported",
            }.items()
        ),
        (f"{PP}=4 {BATCH}=3 {CHUNK}=2", "training.local_batch_size = 3 is not a multiple of .*microbatch_size = 2"),
        (f"{PP}=4 {BATCH}=3", "schedule = '1F1B' needs 4 chunks or more, .*, but training.local_batch_size = 3 over"),
        (f"{PP}=4 {BATCH}=9 {SCHEDULE}=Interleaved1F1B", "degree = 4 needs a multiple of 2 chunks, but .* makes 9"),
        (f"{PP}=4 {BATCH}=8 {VALIDATION}=4", "validation.local_batch_size = 4 is not a multiple of .* makes 8"),
        (f"{PP}=4 {BATCH}=8 --parallelism.pipeline_parallel_schedule_csv=a.csv", "csv = 'a.csv' is not supported"),
        (f"{PP}=3", "parallelism.data_parallel_shard_degree = -1 does not fit 4 process"),
    ],
)
def test_one_line_says_what_is_wrong(flags, message):
    with pytest.raises(ConfigError, match=message) as raised:
        check(flags)
    assert "\n" not in str(raised.value)


INTERLEAVED = f"{SCHEDULE}=Interleaved1F1B"
WHOLE = ["tok_embeddings", *(f"layers.{number}" for number in range(6)), "norm", "output"]


@pytest.mark.parametrize(
    "flags, layers, problem",
    [
        (f"{PP}=4", 6, None),
        (f"{PP}=4", 2, None),
        (f"{PP}=4", 1, "pipeline_parallel_degree = 4 with schedule 1F1B makes 4 stages, but the model has 3 parts: 1"),
        (f"{PP}=4 {INTERLEAVED}", 6, None),
        (f"{PP}=4 {INTERLEAVED}", 5, "makes 8 stages, but the model has 7 parts: 5 layers, plus 1 for the embedding"),
        (
            f"{PP}=4 --parallelism.pipeline_parallel_last_stage_less_layers=3",
            6,
            "makes 4 stages, but the model has 10 parts: .* 3 for the head; a stage needs 3 or more",
        ),
        (f"{PP}=2 {PER_STAGE}=4", 6, None),
        (f"{PP}=2 {PER_STAGE}=2", 6, "layers_per_stage = 2 makes 4 stages: schedule 1F1B with .* = 2 needs 2"),
        (f"{PP}=2 {PER_STAGE}=2 {INTERLEAVED}", 6, None),
        (f"{PP}=2 {PER_STAGE}=3 {INTERLEAVED}", 6, "makes 3 stages: .* needs a multiple of 2, and 4 or more"),
        (f"{PP}=2 {PER_STAGE}=4 {INTERLEAVED}", 6, "makes 2 stages: .* needs a multiple of 2, and 4 or more"),
    ],
)
def test_stages_of_a_model(flags, layers, problem):
    found = stages_problem(settings(flags), layers)
    if problem is None:
        assert found is None
    else:
        with pytest.raises(ConfigError, match=problem):
            raise ConfigError(found)


@pytest.mark.parametrize(
    "parts, problem",
    [
        ([WHOLE[:5], WHOLE[5:]], None),
        (
            [WHOLE[:5], WHOLE[6:]],
            "makes 2 stages: it needs tok_embeddings, layers.0 to layers.5, norm and output, once",
        ),
        ([WHOLE[:5], WHOLE[4:]], "once each and in this order"),
        ([WHOLE[5:], WHOLE[:5]], "once each and in this order"),
        ([WHOLE[:-1], WHOLE[-1:]], "norm and output need the same stage"),
        ([WHOLE[:3], WHOLE[3:5], WHOLE[5:]], "makes 3 stages: schedule 1F1B with .* = 2 needs 2"),
    ],
)
def test_stages_that_the_user_names(parts, problem, tmp_path):
    config = tmp_path / "job.toml"
    config.write_text(f"[parallelism]\nmodule_fqns_per_model_part = {json.dumps(parts)}\n")
    found = stages_problem(settings(f"--job.config_file={config} {PP}=2"), 6)
    assert (found is None) == (problem is None)
    if problem:
        with pytest.raises(ConfigError, match=problem):
            raise ConfigError(found)
