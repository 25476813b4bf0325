"""The schedule in the trainer (see training_runs), and their mistakes in settings."""

import random

import pytest

from mxtrain import ConfigError
from mxtrain.analysis import load_run
from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.metrics import build_metrics_processor
from mxtrain.titan.releases import engine
from tests.support.training_runs import ACCUMULATE, done_once, load, seeds

EVENTS = [
    (3, "fprop=bf16 in layers.1"),
    (6, "end of fprop=bf16 in layers.1"),
]


def events(outcome):
    return [(row["step"], row["event"]) for row in load_run(outcome.folder).events]


def test_changes_are_logged(one):
    run = one["scheduled"]
    assert events(run) == EVENTS
    lines = run.output[0].splitlines()
    assert "step 3: fprop=bf16 in layers.1, to step 5 (mxnorm.schedule[0])" in lines
    assert load_run(run.folder).variant == "mxnorm mxfp8 p=2 + 1 scheduled"


def test_a_change_has_its_effect_from_its_first_step_on(one):
    """The same run without a schedule has the same losses until then, and others from then on."""
    plain, scheduled = one["unscheduled"].losses, one["scheduled"].losses
    assert scheduled[:2] == plain[:2] and scheduled[2] != plain[2]


def test_a_run_resumes_in_the_middle_of_an_entry(one):
    whole, resumed = one["scheduled"], one["scheduled, resumed"]
    assert [(r["loss"], r["grad_norm"]) for r in resumed.rows] == [(r["loss"], r["grad_norm"]) for r in whole.rows]
    assert events(resumed) == EVENTS
    assert "in effect from step 3 to 5: fprop=bf16 in layers.1 (mxnorm.schedule[0])" in resumed.output[0]


def test_other_entries_are_another_experiment(one):
    refused = one["scheduled, another entry"]
    assert refused.statuses == [2]
    assert "error: mxnorm.schedule = [{'from_step': 4, 'norm': 'rmsnorm'}], but" in refused.output[0]


def convert(*flags):
    job_config = parse_job_config(["--model.name=llama3", "--model.flavor=debugmodel", *flags])
    return convert_on_meta(job_config, engine().build_on_meta(job_config))


def test_the_model_of_a_job_is_checked_before_training():
    entry = '{from_step = 2, modules = ["layer.1"], recipe = "bf16"}'
    with pytest.raises(ConfigError, match=r"^mxnorm.schedule\[0\].modules: 'layer.1' matches no module"):
        convert("--model.converters=mxnorm", "--mxnorm.schedule", entry)
    convert("--model.converters=", "--mxnorm.schedule", entry)  # nothing is swapped, and [mxnorm] is not read


def test_another_trainer_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    schedule = '--mxnorm.schedule={from_step = 2, recipe = "bf16"}'
    flags = ["--model.converters=mxnorm", schedule, f"--job.dump_folder={tmp_path}"]
    with pytest.raises(ConfigError, match="mxnorm.schedule needs mxtrain's trainer"):
        build_metrics_processor(parse_job_config(flags), None)


@pytest.mark.sweep
def test_every_layout_switches_as_one_process(base):
    """FSDP2, tensor parallelism and pipelines: every kind of change."""
    text = base / "letters.py"
    text.write_text("".join(random.Random(0).choices("etaoin shrdlu\n", k=40_000)))
    entries = [
        '{from_step = 2, until_step = 2, recipe = "fprop=bf16"}',
        '{from_step = 3, until_step = 3, norm = "rmsnorm"}',
        '{from_step = 4, recipe = "nvfp4"}',
    ]
    exact = ["--mxnorm.stochastic_rounding=false", "--mxnorm.hadamard=false", "--optimizer.lr=1e-3"]
    data = [f"--training.dataset_path={text}", "--data.validation_share=0"]
    flags = [*load(seeds(base)["dense"].folder, 0, 7), *data, "--mxnorm.schedule", *entries, *exact]
    pipeline = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatch_size=2"]
    expected = done_once(base, "scheduled alone", 1, {"alone": flags})["alone"]
    layouts = {
        "fsdp": [*flags, ACCUMULATE[0]],
        "tp": [*flags, "--parallelism.tensor_parallel_degree=2"],
        "pp": [*flags, *pipeline],
    }
    for name, run in done_once(base, "scheduled in two", 2, layouts).items():
        assert run.losses == pytest.approx(expected.losses, rel=1e-5), name
        norms = [[row["grad_norm"] for row in each.rows] for each in (run, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3), name
        assert events(run) == events(expected), name
