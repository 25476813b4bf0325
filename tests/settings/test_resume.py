"""``--resume RUN``, which tests/cli/test_bad_run_folders.py tests, too, and what a resumed run may change."""

import json

import pytest
import tomli_w

from mxtrain.checkpoints.folder import Manifest, package_versions, write_manifest
from mxtrain.checkpoints.start import Start
from mxtrain.errors import ConfigError
from mxtrain.settings.check import check_settings
from mxtrain.settings.fields import Settings
from mxtrain.settings.mxnorm_section import schedule_in
from mxtrain.settings.read import read_settings
from mxtrain.settings.resume import (
    SettingChange,
    changes,
    check_resume,
    checked_start,
    kept_defaults,
    resolved,
    resumed,
    separated,
    settings_before,
)
from mxtrain.settings.titan import known_fields
from mxtrain.settings.types import Resume

KNOWN = known_fields()
HF = {"training.dataset": "hf", "training.dataset_path": "a/b"}


def compare(before: dict, now: dict, batch_before=8, batch_now=8):
    return changes(Settings(KNOWN, before), Settings(KNOWN, now), batch_before, batch_now)


def saved(folder, step: int, **manifest) -> None:
    write_manifest(folder, Manifest(step, True, {}, **{"processes": 1, "versions": package_versions(), **manifest}))


@pytest.fixture
def lines(tmp_path):
    """Lines for the user when a run with other settings goes on after step 100."""

    def lines(before: dict, now: dict) -> list[str]:
        saved(tmp_path, 100, settings=Settings(KNOWN, before).tables())
        return check_resume(Start(100, (), tmp_path), Settings(KNOWN, now), 1)

    return lines


def test_free():
    for now in (
        {"metrics.log_freq": 1, "checkpoint.interval": 7, "job.description": "x", "compile.enable": True},
        {"parallelism.tensor_parallel_degree": 2, "training.local_batch_size": 4, "training.dataloader.num_workers": 2},
        {"mxnorm.mode": "reference", "model_args.max_seq_len": 4096},  # of classes with other rules
        {"data.cache_dir": "elsewhere", "model.hf_assets_path": "tokenizer", "data.prepared": "files-0"},
        {"training.dataset": "files", "training.dataset_path": "moved", "data.seed": 1},
    ):
        assert compare({"training.dataset": "python"}, {"training.dataset": "python", **now}) == [], now
    assert [name for name, field in KNOWN.items() if field.resume is None] == []
    assert KNOWN["model_args.dim"].resume is KNOWN["training.seq_len"].resume is Resume.REFUSED


def test_a_run_keeps_the_defaults_that_it_had():
    """An upgrade that changes a default must not change a run in silence."""
    kept = kept_defaults(KNOWN)
    assert json.loads(json.dumps(kept)) == kept and kept["training.local_batch_size"] == 8
    assert kept.keys() == KNOWN.keys()
    now = Settings(KNOWN, {"optimizer.lr": 0.5})
    before = settings_before({"optimizer": {"lr": 0.5}}, KNOWN, {**kept, "gone.by": 1})
    assert changes(before, now, 8, 8) == []
    off = {"mxnorm": {"mode": "fp8_merged", "diagnostics": {"every": 0}}}  # of a run before "unset"
    merged = Settings(KNOWN, {"mxnorm.mode": "fp8_merged"})
    assert changes(settings_before(off, KNOWN, {"mxnorm.diagnostics.every": 0}), merged, 8, 8) == []
    earlier = settings_before({"optimizer": {"lr": 0.5}}, KNOWN, {**kept, "mxnorm.p": 1, "optimizer.lr": 0.1})
    assert changes(earlier, now, 8, 8) == [SettingChange("mxnorm.p", 1, 2, True)]


def test_applied_and_reported(lines):
    before = {"optimizer.lr": 8e-4, "training.steps": 100, "lr_scheduler.decay_type": "cosine"}
    now = {"optimizer.lr": 1e-4, "training.steps": 200, "training.max_norm": 0.5}
    assert set(lines(before, now)) == {
        "optimizer.lr changes from 0.0008 to 0.0001 at step 101",
        "training.steps changes from 100 to 200 at step 101",
        "lr_scheduler.decay_type changes from 'cosine' to 'linear' at step 101",
        "training.max_norm changes from 1.0 to 0.5 at step 101",
    }


REFUSED = {
    "debug.seed": (None, 1),
    "mxnorm.recipes": ({"layers.0": "bf16", "wo": "nvfp4"}, {"wo": "nvfp4", "layers.0": "bf16"}),  # in another order
    "model.converters": (["mxnorm"], []),
    "data.vocab_size": (512, 1024),
    "optimizer.name": ("AdamW", "Adam"),
    "training.seq_len": (2048, 1024),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_unless_named(lines, tmp_path, name):
    old, new = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        lines({name: old}, {name: new})
    message = str(error.value)
    trained, back = ("without it", "unset") if old is None else (f"with {old!r}", f"to {old!r}")
    assert message.startswith(f"{name} = {new!r}, ") and "\n" not in message
    assert all(fact in message for fact in (str(tmp_path), trained, back))
    assert message.endswith(f" --checkpoint.may_change {name}")
    change = f"{name} changes from {old!r} to {new!r} at step 101"
    assert change in lines({name: old}, {name: new, "checkpoint.may_change": [name]})


@pytest.mark.parametrize("old, new", [("AdamW", "Muon"), ("Muon", "Adam")])
def test_muon_and_adam_load_no_states_of_each_other(lines, old, new):
    now = {"optimizer.name": new, "checkpoint.may_change": ["optimizer.name"]}
    with pytest.raises(ConfigError, match=f"has the states of '{old}'; .* --checkpoint.exclude_from_loading optimizer"):
        lines({"optimizer.name": old}, now)
    assert lines({"optimizer.name": old}, {**now, "checkpoint.exclude_from_loading": ["optimizer"]})


def test_all_refused_settings_are_in_one_message(lines):
    now = {"debug.seed": 1, "mxnorm.p": 2, "mxnorm.recipe": "nvfp4", "checkpoint.may_change": ["mxnorm.recipe"]}
    with pytest.raises(ConfigError) as error:
        lines({"debug.seed": 0, "mxnorm.p": 1}, now)
    facts = ("--checkpoint.may_change mxnorm.recipe,debug.seed,mxnorm.p;", "mxnorm.p (1 -> 2)")
    assert all(fact in str(error.value) for fact in facts) and "\n" not in str(error.value)


def test_sequences_per_step_are_compared_in_effect():
    # Half as many processes: twice as many microbatches, or twice as many sequences in each.
    for now in ({"training.global_batch_size": 8}, {"training.local_batch_size": 8}):
        assert compare({"training.local_batch_size": 4}, now) == []
    assert compare({}, {}, batch_before=8, batch_now=4) == [SettingChange("training.global_batch_size", 8, 4, True)]
    # A run that does not say its number of processes may have said its batch.


def test_streamed_text_has_no_hash_and_must_stay(lines):
    for before, now, name in (
        (HF, HF | {"data.text_key": "content"}, "data.text_key"),
        ({"training.dataset": "c4"}, {"training.dataset": "python"}, "training.dataset"),
    ):
        with pytest.raises(ConfigError, match=f" {name}$"):
            lines(before, now)
        anew = now | {"checkpoint.exclude_from_loading": ["dataloader"]}
        assert [line.split()[0] for line in lines(before, anew)] == [name]


def test_settings_before_leave_out_what_this_version_does_not_know():
    tables = {"mxnorm": {"p": 1, "gone": 3, "recipe": 8}, "old": {"a": 1}, "optimizer": {"lr": 1}}
    before = settings_before(tables, KNOWN)
    assert before.given == {"mxnorm.p": 1, "mxnorm.recipe": 8, "optimizer.lr": 1.0}
    assert before["training.steps"] == KNOWN["training.steps"].default  # as the manifest holds no defaults


def now(**sections) -> Settings:
    return Settings(KNOWN, {f"{section}.{name}": v for section, table in sections.items() for name, v in table.items()})


@pytest.fixture
def start(tmp_path):
    """The checkpoint of step 5 of a run of two processes."""
    checkpoint = tmp_path / "checkpoint" / "step-5"
    checkpoint.mkdir(parents=True)
    saved(checkpoint, 5, settings={"optimizer": {"lr": 0.5}}, processes=2)
    return Start(5, (), checkpoint)


def test_the_manifest_of_the_checkpoint_counts(start):
    fewer, lr = "the number of processes changes from 2 to 1 at step 6", {"optimizer": {"lr": 0.5}}
    assert check_resume(Start(0), now(debug={"seed": 1}), 3) == [], "a run that starts is not compared"
    assert check_resume(start, now(**lr), 2) == []
    assert check_resume(start, now(**lr, training={"global_batch_size": 16}), 1) == [fewer]
    with pytest.raises(ConfigError, match=r"^training.global_batch_size = 8 .*/checkpoint/step-5 .*16"):
        check_resume(start, now(**lr), 1)
    allowed = now(**lr, checkpoint={"may_change": ["training.global_batch_size"]})
    assert check_resume(start, allowed, 1) == ["training.global_batch_size changes from 16 to 8 at step 6", fewer]


def test_the_defaults_of_its_version_count(start):
    saved(start.checkpoint, 5, defaults={"mxnorm.p": 1})
    with pytest.raises(ConfigError, match="^mxnorm.p = 2, .* 1; .*--checkpoint.may_change mxnorm.p$"):
        check_resume(start, now(), 1)


ROUNDING = "mxnorm.scale_rounding"


@pytest.mark.parametrize("saved_rule", (None, "rceil"))
def test_a_run_of_an_earlier_version_keeps_its_rule_for_scales(tmp_path, saved_rule):
    """Until 0.1.0, "rceil" was torchao 0.18's rule."""
    step, converters = tmp_path / "checkpoint" / "step-5", ["mxnorm"]
    step.mkdir(parents=True)

    def begins(versions=(), rule=saved_rule, **sections):
        tables = {"model": {"converters": converters}, "mxnorm": {"scale_rounding": rule} if rule else {}}
        saved(step, 5, settings=tables, versions=dict(versions))
        settings = now(model={"converters": converters}, **{"checkpoint": {"enable": True}, **sections})
        return checked_start(tmp_path, settings, 1)

    for given in ({}, {"mxnorm": {"scale_rounding": "rceil"}}):  # by a config of the user's
        start = begins({"mxtrain": "0.1.0"}, **given)
        assert start.settings == {ROUNDING: "rceil_0_18"} == begins(rule="rceil_0_18").settings
        assert start.notes[-1].startswith(f"{ROUNDING} stays 'rceil_0_18', ") and start.changes == ()
    allowed = begins(checkpoint={"enable": True, "may_change": [ROUNDING]})
    assert allowed.changes == (f"{ROUNDING} changes from 'rceil_0_18' to None at step 6",) and not allowed.settings
    with pytest.raises(ConfigError, match=f"^{ROUNDING} = 'floor', .* with 'rceil_0_18'"):
        begins(mxnorm={"scale_rounding": "floor"})
    same = {} if saved_rule is None else {"mxnorm": {"scale_rounding": saved_rule}}
    assert begins(package_versions(), **same).settings == {}
    converters.clear()
    assert begins(**same).settings == {}


def test_the_recipe_of_a_schedule_keeps_its_rule_for_scales(tmp_path):
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    entry = {"from_share": 0.9, "recipe": "wgrad=mxfp8"}
    tables = {"model": {"converters": ["mxnorm"]}, "mxnorm": {"recipe": "nvfp4", "schedule": [entry]}}
    saved(tmp_path / "checkpoint" / "step-5", 5, settings=tables, versions={"mxtrain": "0.1.0"})
    settings = now(**tables, checkpoint={"enable": True})
    kept = settings.replaced(checked_start(tmp_path, settings, 1).settings)
    check_settings(kept)
    (change,) = schedule_in(kept.values)
    assert kept[ROUNDING] == change.change.gemms["wgrad"].scale_rounding == "rceil_0_18"


def test_a_run_without_power_of_two_scales_has_no_rule_to_keep(start):
    nvfp4 = {"model": {"converters": ["mxnorm"]}, "mxnorm": {"recipe": "nvfp4"}}
    saved(start.checkpoint, 5, settings=nvfp4, versions={"mxtrain": "0.1.0"})
    assert check_resume(start, now(**nvfp4), 1) == []


def test_tiles_of_an_earlier_version_were_nvfp4s_alone(start):
    mixed = {"recipe": "fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4", "weight_tiles": True, "scale_rounding": "floor"}
    mixed = {"model": {"converters": ["mxnorm"]}, "mxnorm": mixed}
    saved(start.checkpoint, 5, settings=mixed, versions={"mxtrain": "0.1.0"})
    with pytest.raises(ConfigError, match="^mxnorm.weight_tiles = True, but .* trained without it; leave it unset"):
        check_resume(start, now(**mixed), 1)
    saved(start.checkpoint, 5, settings=mixed, versions=package_versions())
    assert check_resume(Start(5, (), start.checkpoint), now(**mixed), 1) == []


def test_the_name_of_a_run_may_have_an_equals_sign():
    assert separated(["--resume=outputs/lr=1e-3", "--a=b"]) == ["--resume", "outputs/lr=1e-3", "--a=b"]


def test_a_run_resumes_with_its_settings_but_not_as_it_last_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "run"
    (run / "checkpoint" / "step-5").mkdir(parents=True)
    once = {"load_step": 3, "exclude_from_loading": ["dataloader"], "may_change": ["mxnorm.p"]}
    once |= {"enable": True, "create_seed_checkpoint": True}
    (run / "config.toml").write_text(
        tomli_w.dumps({"checkpoint": once, "training": {"steps": 7}, "debug": {"seed": 1}})
    )
    for words in (["--resume", "run"], ["--resume=run"]):
        tables = read_settings(resolved([*words, "--training.steps", "9"])).tables()
        begins = {"create_seed_checkpoint": False, "load_only": False, "load_step": -1}
        assert tables.pop("checkpoint") == {"enable": True, "exclude_from_loading": [], "may_change": [], **begins}
        job = {"config_file": "run/config.toml", "dump_folder": "run"}
        assert tables == {"job": job, "debug": {"seed": 1}, "training": {"steps": 9}}
    again = read_settings(resolved(["--checkpoint.load_step=5", "--resume", "run"]))
    assert again["checkpoint.load_step"] == 5
    config, flags = resumed("~/run", [])
    assert config == str(run / "config.toml") and flags[-1] == f"--job.dump_folder={run}"
    (run / "checkpoint" / "step-5").rmdir()
    assert resumed("run", ["--help"])[1][-2:] == ["--help", "--job.dump_folder=run"]  # needs no checkpoint
    with pytest.raises(ConfigError, match="^checkpoint.interval = 500.*mxtrain train run/config.toml"):
        resumed("run", [])
    arguments = ["--job.config_file=a.toml", "--training.steps", "5"]
    assert resolved(arguments) == arguments
