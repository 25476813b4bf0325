"""Project, name, group and tags of a wandb run: the user's where given, otherwise from what the run trains."""

import os

from mxtrain.analysis.runs import variant_of

PROJECT = "mxtrain"
LONGEST_TAG = 64
"""Characters that wandb allows"""


def wandb_names(metrics, facts: dict, settings, continues: bool) -> dict:
    """Return the arguments ``entity``, ``project``, ``name``, ``group``, ``tags``, ``notes`` and ``job_type``.

    Each comes from the first of these that says something: the section [metrics], TorchTitan's environment variables,
    wandb's settings (environment and files), the run's own facts. A run that continues keeps the name, group and tags
    that it has on the server, where a user may have changed them.

    Args:
        metrics: the section of the job config.
        facts: of the run, as in run.json.
        settings: a ``wandb.Settings``.
        continues: whether an earlier start of this run has named the wandb run.
    """
    named = {"name": None, "group": None, "tags": None} if continues else default_names(facts)
    tags = _own(metrics, "wandb_tags")
    if tags is None:
        tags = _words(os.environ.get("WANDB_RUN_TAGS")) or settings.run_tags or named["tags"]
    return {
        "entity": os.environ.get("WANDB_TEAM") or settings.entity,
        "project": _own(metrics, "wandb_project") or settings.project or PROJECT,
        "name": _own(metrics, "wandb_name") or os.environ.get("WANDB_RUN_NAME") or settings.run_name or named["name"],
        "group": _own(metrics, "wandb_group") or settings.run_group or named["group"],
        "tags": tags,
        "notes": os.environ.get("WANDB_RUN_NOTES") or settings.run_notes,
        "job_type": os.environ.get("WANDB_RUN_JOB_TYPE") or settings.run_job_type,
    }


def default_names(facts: dict) -> dict:
    """Return ``name``, ``group`` and ``tags``, of the run's model, converter, recipe and p.

    Runs of one model form a group: "llama3 125m". Their names tell them apart: "llama3 125m mxnorm mxfp8 p=1".
    """
    group, variant = f"{facts['model']} {facts['flavor']}", variant_of(facts)
    converter = facts["converter"]
    words = [variant] if converter == "none" else [converter, facts["recipe"]]
    if converter == "mxnorm":
        words.append("exact" if facts["estimator"] == "exact" else f"p={facts['p']}")
    tags = [facts["model"], facts["flavor"], *words]
    return {"name": f"{group} {variant}", "group": group, "tags": [tag[:LONGEST_TAG] for tag in dict.fromkeys(tags)]}


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _own(metrics, setting: str):
    return getattr(metrics, setting, None)  # a job without mxtrain's config module has no such settings
