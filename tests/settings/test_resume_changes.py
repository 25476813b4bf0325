"""What a resumed run may change."""

import json

import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings.read import known_fields
from mxtrain.settings.resume_changes import (
    changes,
    kept_defaults,
    other_defaults,
    report,
    require_allowed,
    settings_before,
)
from mxtrain.settings.resume_classes import ResumeClass
from mxtrain.settings.values import Settings

KNOWN = known_fields()
HF = {"training.dataset": "hf", "training.dataset_path": "a/b"}


def compare(before: dict, now: dict, batch_before=8, batch_now=8):
    return changes(Settings(KNOWN, before), Settings(KNOWN, now), batch_before, batch_now)


def lines(*arguments, **batches) -> list[str]:
    found = compare(*arguments, **batches)
    require_allowed(found, [], "step-100")
    return report(found, 101)


FREE = [
    {"metrics.log_freq": 1, "metrics.enable_wandb": True, "metrics.on_nonfinite_loss": "continue"},
    {"checkpoint.interval": 7, "checkpoint.async_mode": "async", "checkpoint.load_step": 100, "job.description": "x"},
    {"parallelism.data_parallel_replicate_degree": 2, "parallelism.tensor_parallel_degree": 2},
    {"compile.enable": True, "activation_checkpoint.mode": "full", "validation.enable": True},
    {"training.local_batch_size": 4, "training.enable_cpu_offload": True, "training.dataloader.num_workers": 2},
    {"mxnorm.mode": "reference", "fused_rmsnorm.when_compiled": "kernel"},
    {"data.prepared": "files-0", "data.cache_dir": "elsewhere", "model.hf_assets_path": "tokenizer"},
    {"training.dataset": "files", "training.dataset_path": "moved", "data.seed": 0},
]


@pytest.mark.parametrize("now", FREE, ids=lambda now: next(iter(now)))
def test_free(now):
    assert lines({"training.dataset": "python"}, {"training.dataset": "python", **now}) == []


def test_a_run_keeps_the_defaults_that_it_had():
    """An upgrade that changes a default must not change a run in silence."""
    kept = kept_defaults(KNOWN)
    assert json.loads(json.dumps(kept)) == kept and (kept["mxnorm.p"], kept["training.steps"]) == (2, 10_000)
    assert kept["training.local_batch_size"] == 8 and kept.keys() == KNOWN.keys()
    before = settings_before({"optimizer": {"lr": 0.5}}, KNOWN, {**kept, "gone.by": 1})
    assert changes(before, Settings(KNOWN, {"optimizer.lr": 0.5}), 8, 8) == []
    earlier = settings_before({"optimizer": {"lr": 0.5}}, KNOWN, {**kept, "mxnorm.p": 1, "optimizer.lr": 0.1})
    (change,) = changes(earlier, Settings(KNOWN, {"optimizer.lr": 0.5}), 8, 8)
    assert (change.name, change.old, change.new, change.resume_class) == ("mxnorm.p", 1, 2, ResumeClass.REFUSED)


def test_defaults_that_have_changed_are_tables_for_a_file():
    kept = kept_defaults(KNOWN)
    assert other_defaults(KNOWN, kept) == {}
    unset = next(name for name, field in KNOWN.items() if field.default is not None and name.startswith("training."))
    had = {**kept, "mxnorm.p": 1, "mxnorm.guard.window": 7, unset: None, "gone.by": 1}
    assert other_defaults(KNOWN, had) == {"mxnorm": {"p": 1, "guard": {"window": 7}}}


def test_applied_and_reported():
    before = {"optimizer.lr": 8e-4, "training.steps": 100, "lr_scheduler.decay_type": "cosine"}
    now = {"optimizer.lr": 1e-4, "training.steps": 200, "training.max_norm": 0.5, "optimizer.beta2": 0.99}
    assert set(lines(before, now)) == {
        "optimizer.lr changes from 0.0008 to 0.0001 at step 101",
        "training.steps changes from 100 to 200 at step 101",
        "lr_scheduler.decay_type changes from 'cosine' to 'linear' at step 101",
        "training.max_norm changes from 1.0 to 0.5 at step 101",
        "optimizer.beta2 changes from 0.95 to 0.99 at step 101",
    }


REFUSED = {
    "debug.seed": (None, 1),
    "mxnorm.p": (2, 1),
    "mxnorm.recipe": ("mxfp8", "nvfp4"),
    "mxnorm.recipes": ({"layers.0": "bf16", "wo": "nvfp4"}, {"wo": "nvfp4", "layers.0": "bf16"}),  # in another order
    "mxnorm.filter_fqns": (["output"], []),
    "model.converters": (["mxnorm"], []),
    "model.flavor": ("125M", "1B"),
    "data.vocab_size": (512, 1024),
    "optimizer.name": ("AdamW", "Adam"),
    "training.seq_len": (2048, 1024),
    "training.dtype": ("float32", "bfloat16"),
    "training.mixed_precision_param": ("bfloat16", "float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_unless_named(name):
    old, new = REFUSED[name]
    found = compare({name: old}, {name: new})
    with pytest.raises(ConfigError) as error:
        require_allowed(found, [], "step-100")
    trained, back = ("without it", "leave it unset") if old is None else (f"with {old!r}", f"set it to {old!r}")
    assert str(error.value) == (
        f"{name} = {new!r}, but step-100 was trained {trained}; {back}, or allow the change with "
        f"--checkpoint.may_change {name}"
    )
    require_allowed(found, [name], "step-100")
    assert report(found, 101) == [f"{name} changes from {old!r} to {new!r} at step 101"]


def test_all_refused_settings_are_in_one_message():
    found = compare({"debug.seed": 0, "mxnorm.p": 1}, {"debug.seed": 1, "mxnorm.p": 2, "mxnorm.recipe": "nvfp4"})
    with pytest.raises(ConfigError) as error:
        require_allowed(found, ["mxnorm.recipe"], "step-100")
    assert str(error.value).count("\n") == 0
    assert "--checkpoint.may_change mxnorm.recipe,debug.seed,mxnorm.p; these differ, too: mxnorm.p (1 -> 2)" in str(
        error.value
    )


def test_sequences_per_step_are_compared_in_effect():
    # Half as many processes: twice as many microbatches, or twice as many sequences in each.
    for now in ({"training.global_batch_size": 8}, {"training.local_batch_size": 8}):
        assert lines({"training.local_batch_size": 4}, now) == []
    (change,) = compare({}, {}, batch_before=8, batch_now=4)
    with pytest.raises(ConfigError, match="^training.global_batch_size = 4 in effect, but step-100 was trained with 8"):
        require_allowed([change], [], "step-100")
    # A run that does not say its number of processes may have said its batch.
    assert compare({}, {}, batch_before=None) == []
    assert compare({"training.global_batch_size": 8}, {}, batch_before=None) == []
    assert len(compare({"training.global_batch_size": 8}, {}, batch_before=None, batch_now=4)) == 1


@pytest.mark.parametrize(
    "before, now, names",
    [
        (HF, HF | {"training.dataset_path": "c/d"}, {"training.dataset_path"}),
        (HF, HF | {"data.text_key": "content"}, {"data.text_key"}),
        ({"training.dataset": "c4"}, {"training.dataset": "c4_test"}, {"training.dataset"}),
        ({"training.dataset": "c4"}, {"training.dataset": "python"}, {"training.dataset"}),
    ],
)
def test_streamed_text_has_no_hash_and_must_stay(before, now, names):
    found = compare(before, now)
    assert {change.name for change in found} == names
    with pytest.raises(ConfigError, match="may_change training.dataset|may_change data.text_key"):
        require_allowed(found, [], "step-100")
    anew = now | {"checkpoint.exclude_from_loading": ["dataloader"]}
    assert {line.split()[0] for line in lines(before, anew)} == names


def test_settings_before_leave_out_what_this_version_does_not_know():
    tables = {
        "mxnorm": {"p": 1, "gone": 3, "recipe": 8},
        "old": {"a": 1},
        "training": {"dataloader": {"num_workers": 2}},
    }
    before = settings_before(tables, KNOWN)
    assert before.given == {"mxnorm.p": 1, "mxnorm.recipe": 8, "training.dataloader.num_workers": 2}
    assert before["training.steps"] == KNOWN["training.steps"].default  # as the manifest holds no defaults
    assert settings_before({"optimizer": {"lr": 1}}, KNOWN)["optimizer.lr"] == 1.0
