"""Mistakes in the settings of a pipeline: its schedule, its chunks, and which layers its stages hold."""

import math

from mxtrain.settings.relations import Relation
from mxtrain.settings.values import Settings

ONE_STAGE = ("1F1B", "GPipe")
"""Schedules with one stage on each rank"""
SEVERAL_STAGES = ("Interleaved1F1B", "LoopedBFS")
"""Schedules with two stages on each rank, or more"""
SCHEDULES = ONE_STAGE + SEVERAL_STAGES
# Schedules that compute the gradients of inputs and of weights apart. The backward of a layer computes both each time
# it runs, so half of its work would be in vain.
_ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

_DEGREE = "parallelism.pipeline_parallel_degree"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_CHUNK = "parallelism.pipeline_parallel_microbatch_size"
_PARTS = "parallelism.module_fqns_per_model_part"


def _chunks(s: Settings) -> int:
    return s["training.local_batch_size"] // s[_CHUNK]


def _in_chunks(s: Settings) -> str:
    batch = s["training.local_batch_size"]
    return f"training.local_batch_size = {batch} over {_CHUNK} = {s[_CHUNK]} makes {_chunks(s)}"


def _schedule_problem(s: Settings) -> str | None:
    schedule, ranks, chunks = s[_SCHEDULE], s[_DEGREE], _chunks(s)
    if schedule not in SCHEDULES:
        reason = "runs the backward of every layer twice" if schedule in _ZERO_BUBBLE else "is not supported"
        return f"{reason}: allowed are {', '.join(SCHEDULES)}"
    if schedule == "1F1B" and chunks < ranks:
        return f"needs {ranks} chunks or more, one for each stage, but {_in_chunks(s)}"
    rounds = max(1, chunks // ranks)
    if schedule == "Interleaved1F1B" and chunks % rounds:
        return f"with {_DEGREE} = {ranks} needs a multiple of {rounds} chunks, but {_in_chunks(s)}"
    return None


RELATIONS = (
    Relation(
        "parallelism.pipeline_parallel_schedule_csv",
        lambda s, machine: (
            s[_DEGREE] > 1
            and s["parallelism.pipeline_parallel_schedule_csv"]
            and f"is not supported: leave it empty, and choose {_SCHEDULE} from {', '.join(SCHEDULES)}"
        ),
    ),
    Relation(
        "training.local_batch_size",
        lambda s, machine: (
            s[_DEGREE] > 1
            and s["training.local_batch_size"] % s[_CHUNK]
            and f"is not a multiple of {_CHUNK} = {s[_CHUNK]}"
        ),
    ),
    Relation(_SCHEDULE, lambda s, machine: s[_DEGREE] > 1 and _schedule_problem(s)),
    Relation(
        "validation.local_batch_size",
        lambda s, machine: (
            s[_DEGREE] > 1
            and s["validation.enable"]
            and s["validation.local_batch_size"] % _chunks(s)
            and f"is not a multiple of the chunks of a batch in training: {_in_chunks(s)}"
        ),
    ),
)


def stages_problem(s: Settings, layers: int) -> str | None:
    """What is wrong with the stages of a pipeline over so many layers, with the setting; None if all is well.

    Follows ``pipeline_llm`` and ``generate_llm_fqn_per_model_part`` of TorchTitan 0.2.2. They count the embedding and
    the head as so many layers as the settings say, and give every stage as many layers as another, or one more.
    """
    ranks, schedule = s[_DEGREE], s[_SCHEDULE]
    if s[_PARTS] is not None:
        problem = _parts_problem(s[_PARTS], layers) or _ranks_problem(len(s[_PARTS]), ranks, schedule)
        return problem and f"{_PARTS} = {s[_PARTS]!r} makes {len(s[_PARTS])} stages: {problem}"
    first = s["parallelism.pipeline_parallel_first_stage_less_layers"]
    last = s["parallelism.pipeline_parallel_last_stage_less_layers"]
    parts = layers + first + last
    per_stage = s["parallelism.pipeline_parallel_layers_per_stage"]
    if per_stage is None:
        stages = ranks * (1 if schedule in ONE_STAGE else 2)
        setting = f"{_DEGREE} = {ranks} with schedule {schedule}"
    else:
        stages = math.ceil(parts / per_stage)
        setting = f"parallelism.pipeline_parallel_layers_per_stage = {per_stage}"
        if problem := _ranks_problem(stages, ranks, schedule):
            return f"{setting} makes {stages} stages: {problem}"
    if parts // stages < max(1, first, last):
        counted = f"{layers} layers, plus {first} for the embedding and {last} for the head"
        needed = f"a stage needs {max(1, first, last)} or more"
        return f"{setting} makes {stages} stages, but the model has {parts} parts: {counted}; {needed}"
    return None


def _parts_problem(parts: list[list[str]], layers: int) -> str | None:
    whole = ["tok_embeddings", *(f"layers.{number}" for number in range(layers)), "norm", "output"]
    if [name for part in parts for name in part] != whole:
        return f"it needs tok_embeddings, layers.0 to layers.{layers - 1}, norm and output, once each and in this order"
    if "norm" not in parts[-1] or not all(parts):
        return "norm and output need the same stage, and every stage needs a module"
    return None


def _ranks_problem(stages: int, ranks: int, schedule: str) -> str | None:
    place = f"schedule {schedule} with {_DEGREE} = {ranks} needs"
    if schedule in ONE_STAGE and stages != ranks:
        return f"{place} {ranks}"
    if schedule in SEVERAL_STAGES and (stages % ranks or stages == ranks):
        return f"{place} a multiple of {ranks}, and {2 * ranks} or more"
    return None
