from types import SimpleNamespace

import pytest
import wandb

from mxtrain.settings.sections import Metrics
from mxtrain.titan.reports.wandb_names import default_names, wandb_names

FACTS = {
    "model": "llama3",
    "flavor": "125m",
    "converter": "mxnorm",
    "converters": ["mxnorm"],
    "recipe": "mxfp8",
    "p": 2,
}
FACTS |= {"estimator": "pre_round", "precision": "bfloat16 compute, float32 parameters"}


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch):
    for name in ("TEAM", "RUN_NAME", "RUN_TAGS", "RUN_NOTES", "RUN_JOB_TYPE"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)


def names(metrics=None, continues=False, **settings):
    return wandb_names(metrics or Metrics(), FACTS, wandb.Settings(**settings), continues)


@pytest.mark.parametrize(
    ("facts", "name", "tags"),
    [
        ({}, "mxnorm mxfp8 p=2", ["mxnorm", "mxfp8", "p=2"]),
        ({"estimator": "exact"}, "mxnorm mxfp8 exact", ["mxnorm", "mxfp8", "exact"]),
        ({"converter": "mx_linear", "converters": ["mx_linear"]}, "mx_linear mxfp8", ["mx_linear", "mxfp8"]),
        ({"converter": "none", "converters": []}, "bf16", ["bf16"]),
        ({"recipe": "x" * 99}, f"mxnorm {'x' * 99} p=2", ["mxnorm", "x" * 64, "p=2"]),
    ],
)
def test_names_come_from_what_the_run_trains(facts, name, tags):
    found = default_names({**FACTS, **facts})
    assert found == {"name": f"llama3 125m {name}", "group": "llama3 125m", "tags": ["llama3", "125m", *tags]}


def test_the_settings_override_the_environment_which_overrides_the_facts(monkeypatch):
    found = names()
    assert (found["project"], found["name"], found["group"]) == (
        "mxtrain",
        "llama3 125m mxnorm mxfp8 p=2",
        "llama3 125m",
    )
    assert found["entity"] is found["notes"] is found["job_type"] is None

    theirs = {
        "project": "p",
        "run_name": "n",
        "run_group": "g",
        "run_tags": ("a", "b"),
        "entity": "e",
        "run_notes": "o",
    }
    found = names(**theirs, run_job_type="j")
    assert list(found.values()) == ["e", "p", "n", "g", ("a", "b"), "o", "j"]

    for name, value in {
        "TEAM": "E",
        "RUN_NAME": "N",
        "RUN_TAGS": "c, d",
        "RUN_NOTES": "O",
        "RUN_JOB_TYPE": "J",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert list(names(**theirs).values()) == ["E", "p", "N", "g", ["c", "d"], "O", "J"]

    metrics = Metrics(wandb_project="1", wandb_name="2", wandb_group="3", wandb_tags=["4"])
    assert list(names(metrics, **theirs).values()) == ["E", "1", "2", "3", ["4"], "O", "J"]
    assert names(Metrics(wandb_tags=[]), **theirs)["tags"] == []


def test_a_run_that_continues_keeps_its_names_unless_the_settings_say_others():
    assert [names(continues=True)[key] for key in ("name", "group", "tags")] == [None] * 3
    assert names(Metrics(wandb_name="new"), continues=True)["name"] == "new"


def test_a_job_without_mxtrains_config_module_has_names():
    assert names(SimpleNamespace(log_freq=1))["group"] == "llama3 125m"
