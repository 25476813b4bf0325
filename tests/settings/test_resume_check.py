"""What a resume compares its settings with."""

import pytest

from mxtrain.checkpoints.manifest import Manifest, write_manifest
from mxtrain.checkpoints.start import Start
from mxtrain.errors import ConfigError
from mxtrain.settings.layout import RELATIONS as LAYOUT_RELATIONS
from mxtrain.settings.machine import Machine
from mxtrain.settings.read import known_fields
from mxtrain.settings.relations import check
from mxtrain.settings.resume_check import check_resume
from mxtrain.settings.values import Settings

KNOWN = known_fields()


def now(**sections) -> Settings:
    return Settings(KNOWN, {f"{section}.{name}": v for section, table in sections.items() for name, v in table.items()})


@pytest.fixture
def start(tmp_path):
    """The checkpoint of step 5 of a run of two processes."""
    checkpoint = tmp_path / "checkpoint" / "step-5"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, Manifest(5, True, {}, settings={"optimizer": {"lr": 0.5}}, processes=2))
    return Start(5, (), checkpoint)


SAME = {"training": {"global_batch_size": 16}, "optimizer": {"lr": 0.5}}


def test_the_manifest_of_the_checkpoint_counts(start):
    fewer = "the number of processes changes from 2 to 1 at step 6"
    assert check_resume(start, now(**SAME), 1) == [fewer]
    assert check_resume(start, now(optimizer={"lr": 0.5}), 2) == []
    assert check_resume(start, now(optimizer={"lr": 1.0}), 2) == ["optimizer.lr changes from 0.5 to 1.0 at step 6"]
    with pytest.raises(ConfigError, match=r"^training.global_batch_size = 8 in effect, but .*/checkpoint/step-5 was"):
        check_resume(start, now(**SAME | {"training": {}}), 1)
    allowed = now(**SAME | {"training": {}, "checkpoint": {"may_change": ["training.global_batch_size"]}})
    assert check_resume(start, allowed, 1) == ["training.global_batch_size changes from 16 to 8 at step 6", fewer]


@pytest.mark.parametrize(
    "processes, local, also",
    [(1, 8, ""), (2, 8, ""), (4, 8, " and set training.local_batch_size to 4"),
     (8, 6, " and set training.local_batch_size to 2"),
     (3, 8, " and take a number of data-parallel processes that divides 16")],
)  # fmt: skip
def test_a_refused_batch_names_the_settings_that_work(start, processes, local, also):
    given = {"optimizer": {"lr": 0.5}, "training": {"local_batch_size": local}}
    given["training"]["global_batch_size"] = 48 if processes != 3 else -1
    with pytest.raises(ConfigError) as error:
        check_resume(start, now(**given), processes)
    assert f"was trained with 16; set it to 16{also}, or allow" in str(error.value)
    if processes != 3:
        given["training"] |= {"global_batch_size": 16, "local_batch_size": int(also[-1:] or local)}
        check(LAYOUT_RELATIONS, now(**given), Machine(processes, has_gpus=False))
        assert len(check_resume(start, now(**given), processes)) == (processes != 2)


def test_the_defaults_of_its_version_count(start):
    write_manifest(start.checkpoint, Manifest(5, True, {}, defaults={"mxnorm.p": 1}))
    with pytest.raises(ConfigError, match="mxnorm.p = 2, but .* was trained with 1; set it to 1, or allow the change"):
        check_resume(start, now(), 1)


def test_entries_of_the_schedule_that_move_with_the_number_of_steps_are_reported(start):
    entries = [{"from_share": 0.9, "recipe": "bf16"}, {"from_step": 1, "until_step": 2, "p": 1}]
    model, mxnorm = {"converters": ["mxnorm"]}, {"schedule": entries}
    settings = {"optimizer": {"lr": 0.5}, "model": model, "mxnorm": mxnorm, "training": {"steps": 100}}
    write_manifest(start.checkpoint, Manifest(5, True, {}, settings=settings, processes=2))
    assert check_resume(start, now(**settings), 2) == []
    assert check_resume(start, now(**settings | {"training": {"steps": 200}}), 2) == [
        "training.steps changes from 100 to 200 at step 6",
        "mxnorm.schedule[0] moves from steps 91 to 100 to steps 181 to 200",
    ]
    other = {"mxnorm": {"schedule": entries[:1]}, "checkpoint": {"may_change": ["mxnorm.schedule"]}}
    changes = check_resume(start, now(**settings | other | {"training": {"steps": 200}}), 2)
    assert len(changes) == 2 and not any("moves" in change for change in changes), "a new schedule has not moved"


def test_a_run_that_starts_is_not_compared():
    assert check_resume(Start(0), now(debug={"seed": 1}), 3) == []
