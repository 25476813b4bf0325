"""Losses of pipelines, and what one process computes."""

import json

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from mxtrain import ConfigError
from mxtrain.analysis import load_run
from mxtrain.analysis.numerics import by_figure
from mxtrain.checkpoints.folder import read_manifest
from mxtrain.checkpoints.storage import read_index
from mxtrain.titan import layouts
from mxtrain.titan.v02.parallelize import LossPerToken
from tests.support import oracle, training_runs
from tests.support.recording import record_all
from tests.support.training_runs import SCHEDULE, Outcome, Resumed, done_once, steps

DIAGNOSTICS = ["--mxnorm.diagnostics.every=3", "--mxnorm.diagnostics.tokens=64"]
SAVE = ["--checkpoint.enable", "--checkpoint.interval=1"]
RECIPES = {
    **oracle.RECIPES,
    "nvfp4": [training_runs.NVFP4],
    "mixed": ["--mxnorm.recipe=fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4"],
    "experts": ["--model.name=deepseek_v3", "--model.converters=decompose_k_router"],
}
ONE, ALL_ON_ONE = "one process for pipelines", "one process in chunks"


def run(recipe: str, *flags: str, **degrees: int) -> list[str]:
    return [*oracle.COMMON, *oracle.layout(**degrees), *RECIPES[recipe], *flags]


def validate(base) -> list[str]:
    """Validation after every second step, in other sizes than training."""
    return [*training_runs.validate(base), "--validation.freq=2"]


def two(base) -> dict[str, Outcome]:
    validated = validate(base)
    one(base)
    runs = {
        "1f1b, accumulated, unquantized": run("unquantized", *validated, pipeline=2, accumulate=2),
        "interleaved, nvfp4": run(
            "nvfp4", f"{SCHEDULE}=Interleaved1F1B", *SAVE, *oracle.follow(base, "nvfp4", ONE), pipeline=2
        ),
        "interleaved, nvfp4, resumed": Resumed("interleaved, nvfp4", 2, DIAGNOSTICS),
    }
    return done_once(base, "pipelines", 2, runs, record_all)


def one(base) -> dict[str, Outcome]:
    """One process. Tensors with one scale each and random bits differ by microbatch, so it sees chunk after chunk."""
    validated = validate(base)
    runs = {"unquantized": run("unquantized", *validated), "nvfp4": run("nvfp4", *SAVE, accumulate=4)}
    return done_once(base, ONE, 1, runs, record_all)


SWEEP = {
    2: {
        "gpipe, bf16": run("bf16", f"{SCHEDULE}=GPipe", pipeline=2),
        "looped, fused_norm": run("fused_norm", f"{SCHEDULE}=LoopedBFS", pipeline=2),
        "large chunks, mxfp8": run("mxfp8", "--parallelism.pipeline_parallel_microbatch_size=2", pipeline=2),
        "selective checkpointing, mixed": run("mixed", "--activation_checkpoint.mode=selective", pipeline=2),
        "interleaved, compiled, checkpointed, nvfp4": run(
            "nvfp4",
            f"{SCHEDULE}=Interleaved1F1B",
            "--compile.enable",
            "--compile.backend=aot_eager",
            "--activation_checkpoint.mode=selective",
            pipeline=2,
        ),
        "experts": run("experts", pipeline=2),
    },
    4: {
        "tensor, mxfp8": run("mxfp8", pipeline=2, tensor=2),
        "of four stages, unquantized": run("unquantized", pipeline=4),
        "interleaved, accumulated x fsdp, mxfp8": run(
            "mxfp8", f"{SCHEDULE}=Interleaved1F1B", pipeline=2, shard=2, accumulate=2
        ),
        "x ddp, mx_linear": run("mx_linear", pipeline=2, replicate=2),
    },
}


@pytest.fixture(scope="module")
def found(base) -> dict[str, Outcome]:
    return two(base)


@pytest.fixture(scope="module")
def expected(base) -> dict[str, Outcome]:
    return one(base)


def require_equal(expected: Outcome, found: Outcome, processes: int, recipe: str) -> None:
    trainings = oracle.read(expected, 1), oracle.read(found, processes)
    oracle.require_match(*trainings, recipe)


@pytest.mark.parametrize("name", ["1f1b, accumulated, unquantized", "interleaved, nvfp4"])
def test_a_pipeline_matches_one_process(expected, found, name):
    """In NVFP4 every chunk has the random bits of the microbatch with its number in one process."""
    recipe = name.rpartition(", ")[2]
    require_equal(expected[recipe], found[name], 2, recipe)
    assert [row["tokens_seen"] for row in found[name].rows] == [row["tokens_seen"] for row in expected[recipe].rows]


def losses_of_validation(outcome: Outcome) -> list[float]:
    return [row["validation_loss"] for row in load_run(outcome.folder).validation]


def test_validation_between_steps_matches_one_process(expected, found):
    ours = losses_of_validation(found["1f1b, accumulated, unquantized"])
    theirs = losses_of_validation(expected["unquantized"])
    assert len(ours) == 3 and ours == pytest.approx(theirs, rel=1e-5)


def test_a_resumed_pipeline_is_the_uninterrupted_one_bit_for_bit(found):
    whole, resumed = found["interleaved, nvfp4"], found["interleaved, nvfp4, resumed"]
    assert "resum" in resumed.output[0].lower()
    ours, theirs = oracle.read(resumed, 2), oracle.read(whole, 2)
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for one_step, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert all(torch.equal(one_step[name], other[name]) for name in other)
    # With diagnostics in the first step after it resumes, whose first pass finds out the shapes of stages.
    (figures,) = load_run(resumed.folder).numerics
    found = by_figure([figures])
    assert figures["step"] == 3 and len(found["wgrad_error"]) == 14 and len(found["rms_r2"]) == 4


def shapes(outcome) -> dict[str, torch.Size]:
    """The weights in the last checkpoint by name."""
    found = read_index(outcome.folder / "checkpoint" / f"step-{oracle.STEPS}").state_dict_metadata.items()
    return {name: tensor.size for name, tensor in found if name.startswith(("layers.", "tok_", "norm.", "output."))}


def test_a_checkpoint_holds_all_stages(expected, found):
    ours = found["interleaved, nvfp4"]
    assert shapes(ours) == shapes(expected["nvfp4"])
    assert read_manifest(ours.folder / "checkpoint" / f"step-{oracle.STEPS}").processes == 2


def test_rank_0_reports_the_whole_model_and_the_loss_of_the_last_stage(expected, found):
    ours, theirs = found["interleaved, nvfp4"], expected["nvfp4"]
    assert json.loads((ours.folder / "run.json").read_text())["world_size"] == 2
    count = sum(shape.numel() for shape in shapes(theirs).values())
    assert f"{count:,} parameters" in ours.output[0] and "4 norms and 14 linears swapped" in ours.output[0]
    assert f"loss {ours.losses[0]:.4f}" in ours.output[0]
    assert not ours.output[1].strip()
    conversion = [(outcome.folder / "conversion.txt").read_text() for outcome in (ours, theirs)]
    assert conversion[0] == conversion[1]


@pytest.mark.sweep
@pytest.mark.parametrize("processes, name", [(processes, name) for processes in SWEEP for name in SWEEP[processes]])
def test_every_pipeline_matches_one_process(base, processes, name):
    recipe = name.rpartition(", ")[2]
    chunked = {"nvfp4": run("nvfp4", accumulate=4), "mixed": run("mixed", accumulate=4), "experts": run("experts")}
    theirs = (oracle.outcomes_of_one(base) | done_once(base, ALL_ON_ONE, 1, chunked, record_all))[recipe]
    runs = oracle.following(base, SWEEP[processes]) | oracle.following(
        base, {key: flags for key, flags in SWEEP[processes].items() if key.endswith((*chunked,))}, ALL_ON_ONE
    )
    ours = done_once(base, f"all pipelines on {processes}", processes, runs, record_all)[name]
    require_equal(theirs, ours, processes, recipe)


@pytest.mark.sweep
def test_pipelines_beside_parallelism_within_layers_match_one_process(base, expected):
    """Gradients and validation: a loss in parts, and parts of sequences."""
    validated = validate(base)
    runs = {
        "tensor, unquantized": run("unquantized", *validated, pipeline=2, tensor=2, accumulate=2),
        "context, unquantized": run("unquantized", *validated, pipeline=2, context=2, accumulate=2),
    }
    theirs = expected["unquantized"]
    for ours in done_once(base, "pipelines beside others", 4, runs, record_all).values():
        require_equal(theirs, ours, 4, "unquantized")
        assert losses_of_validation(ours) == pytest.approx(losses_of_validation(theirs), rel=1e-5)


@pytest.mark.sweep
def test_a_run_goes_on_under_one_layout_after_another(base):
    """One step each on four processes in four layouts, and one in one process."""
    flags = ["unquantized", *SAVE, f"--job.dump_folder={base / 'under every layout'}"]
    layouts = [{"shard": 4}, {"tensor": 2, "shard": 2}, {"pipeline": 2, "shard": 2}, {"pipeline": 2, "replicate": 2}]
    on_four = {f"step {step}": run(*flags, steps(step), **degrees) for step, degrees in enumerate(layouts, 1)}
    on_one = {"step 5": run(*flags, steps(5))}
    for name, processes, runs in (("resharded", 4, on_four), ("resharded on one", 1, on_one)):
        for outcome in done_once(base, name, processes, runs).values():
            assert set(outcome.statuses) == {0}, outcome.output[0][-4000:]
    alone = {"run": run("unquantized", steps(5))}
    ours, theirs = outcome.rows, oracle.outcomes_of(base, "one process, resharded", 1, alone)
    for key in ("step", "tokens_seen", "lr"):
        assert [row[key] for row in ours] == [row[key] for row in theirs["run"].rows], key
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs["run"].rows], rel=1e-5), key


def test_layers_that_torchtitan_cannot_divide_into_stages_are_one_line():
    def build():
        raise ValueError("4 stages\nfor 3 ranks")

    with pytest.raises(ConfigError, match="^parallelism: 4 stages for 3 ranks$"):
        layouts.build_pipeline(build, None, None)


def test_a_loss_is_divided_by_the_tokens_inside_of_the_context_and_by_the_parts_outside():
    loss = LossPerToken(lambda prediction, labels: (prediction - labels).sum(), parts=2)
    prediction, labels = torch.full((4,), 3.0, requires_grad=True), torch.ones(4)
    assert loss(prediction, labels) == 4
    with loss.divided_by(torch.tensor(16.0)):
        loss(prediction, labels).backward()
    assert prediction.grad.tolist() == [1 / 16] * 4
    assert loss(prediction, labels) == 4


@pytest.mark.parametrize("has_last_stage", [True, False])
def test_every_rank_gets_the_loss_of_all_chunks(monkeypatch, has_last_stage):
    calls = []

    class Schedule:
        def step(self, x, *, target, losses, **kwargs):
            calls.append((target, kwargs))
            if losses is not None:
                losses += [torch.tensor(2.0), torch.tensor(4.0)]

        eval = step

    monkeypatch.setattr(layouts.dist, "all_reduce", lambda loss, group: loss.add_(0 if has_last_stage else 6))
    shared, losses = layouts.SharedLoss(Schedule(), has_last_stage, None, torch.device("cpu")), []
    shared.step("x", target="labels", losses=losses, mask=1)
    shared.eval("x", target="labels", losses=losses, mask=1)
    assert losses == [6, 6]
    target = "labels" if has_last_stage else None
    assert calls == [(target, {"mask": 1}), (target, {"mask": 1, "return_outputs": False})]


def test_finding_shapes_leaves_the_buffers_as_they_were(monkeypatch):
    stage = object.__new__(layouts.Stage)
    stage.submod = torch.nn.BatchNorm1d(2)

    def find(self, *args, **kwargs):
        self.submod.num_batches_tracked += 1

    monkeypatch.setattr(PipelineStage, "_prepare_forward_infra", find)
    monkeypatch.setattr(PipelineStage, "_post_metadata_inference_cleanup", lambda self: None, raising=False)
    stage._prepare_forward_infra()
    assert stage.submod.num_batches_tracked == 1
    stage._post_metadata_inference_cleanup()
    assert stage.submod.num_batches_tracked == 0
