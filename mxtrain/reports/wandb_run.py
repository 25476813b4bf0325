"""Logs a run to wandb by TorchTitan's logger, without letting wandb stop or block the run.

TorchTitan and wandb read names, id and more from the environment. Without credentials, or if wandb's server does not
answer in time, the run is offline: it records the same data for ``wandb sync``. WANDB_MODE, WANDB_SILENT and wandb's
other settings stay as the user set them.

``run.json`` keeps the id of the wandb run. A resumed run starts wandb with this id and WANDB_RESUME = "allow", so that
a server appends to the run. Offline, every start makes a local folder with the same id, and ``wandb sync`` of all of
them uploads one run (wandb 0.31). A first part that is uploaded last would replace all others, so a run stays offline
until its earlier parts are uploaded. wandb's history only grows, so steps that wandb has are not sent again.
"""

import glob
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mxtrain.analysis.metrics_file import NUMERICS, read_metrics
from mxtrain.analysis.numerics import wandb_key
from mxtrain.analysis.runs import variant_of
from mxtrain.json_toml import read_json
from mxtrain.run_folder import files

logger = logging.getLogger()  # TorchTitan's

DEFAULTS = {
    "WANDB_INIT_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT": "120",
    "WANDB_FINISH_TIMEOUT_RAISES": "true",
    "WANDB_SILENT": "true",
    "WANDB_PROJECT": "mxtrain",
}
"""
Values of wandb's variables where the user has set none. Timeouts are in seconds: after the first, the run is offline;
after the second, the upload at the end stops. wandb is silent because the summary says where the run is
"""
LONGEST_TAG = 64
"""Characters that wandb allows"""
USERS_CHOICES = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")
"""Variables by which the user decides which wandb run continues"""


def earlier_run(folder: Path) -> tuple[str, int] | None:
    """Return the id of the wandb run of the run in ``folder``, and the last logged step.

    None if it has no wandb run, or none whose files can be read.
    """
    try:
        run_id = read_json(folder / files.FACTS_FILE)["wandb"]["id"]
        last_step = max(row["step"] for row in read_metrics(folder / files.METRICS_FILE))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (run_id, last_step) if isinstance(run_id, str) and run_id else None


class WandbLogger:
    """Logs TorchTitan's metrics. A failure of wandb after the start is one warning."""

    def __init__(self, start: Callable, job: dict, facts: dict, folder: Path, earlier: tuple[str, int] | None = None):
        """Start wandb. Raises whatever wandb raises for wrong settings, such as WANDB_MODE = "sideways".

        Args:
            start: makes TorchTitan's logger, which starts a wandb run.
            job: the sections of the job config.
            facts: of the run, as in run.json.
            folder: of the run.
            earlier: of ``earlier_run``, which this run continues unless the user has chosen another one.
        """
        import wandb

        if any(os.environ.get(name) for name in USERS_CHOICES):
            earlier = None
        run_id, self.last_step = earlier or (None, 0)
        self.has_failed = False
        stays_offline = run_id is not None and sync_command(folder, run_id) is not None
        with _environment(variables(job["metrics"], facts, run_id)):
            self.logger = started(start, stays_offline)
        self.run = wandb.run
        if self.run.resumed:
            self.last_step = self.run.starting_step - 1  # a server knows which steps have reached it
        # The sections of the job config keep their names.
        self.run.config.update({key: value for key, value in facts.items() if key not in job}, allow_val_change=True)

    def log(self, metrics: dict, step: int) -> None:
        if step <= self.last_step:
            return
        row = {wandb_key(name) if name.startswith(NUMERICS) else name: value for name, value in metrics.items()}
        self._try(lambda: self.logger.log(row, step))

    def log_event(self, step: int, text: str) -> None:
        """Log a text with a step, in the column "event"; the run's summary keeps the last one."""
        if step > self.last_step:
            self._try(lambda: self.logger.log({"event": text}, step))

    def close(self) -> None:
        self._try(self.logger.close)

    def _try(self, action) -> None:
        try:
            action()
        except Exception as error:
            if not self.has_failed:
                logger.warning(f"wandb failed: {first_line(error)}; training goes on, and metrics are in metrics.jsonl")
            self.has_failed = True


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    os.environ.pop("WANDB_RUN_TAGS", None)  # a text, which TorchTitan hands to wandb as a list: a tag per letter
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def started(start: Callable, stays_offline: bool = False):
    """Return ``start()``, offline where it cannot be online.

    Args:
        start: starts a wandb run.
        stays_offline: do not go online, unless WANDB_MODE says so.

    Raises whatever wandb raises for wrong settings.
    """
    import wandb

    if wandb.setup().settings.mode == "online":
        try:
            if not (stays_offline and "WANDB_MODE" not in os.environ) and wandb.login(verify=False, prompt=False):
                return start()
        except Exception as error:
            logger.warning(f"wandb cannot be online: {first_line(error)}; the run is offline")
        # wandb has read the environment, which it does once per process.
        wandb.setup(settings=wandb.Settings(mode="offline"))
    return start()


def variables(metrics: dict, facts: dict, run_id: str | None) -> dict[str, str]:
    """Return the environment variables by which TorchTitan and wandb name the run.

    Each comes from the first of these that says something: the section [metrics], the environment, the run's own facts.
    A run that continues keeps the name, group and tags that it has on the server, where a user may have changed them.

    Args:
        metrics: the section of the job config. Without mxtrain's config module it has no settings of wandb.
        facts: of the run, as in run.json.
        run_id: of the wandb run that goes on, if any.
    """
    own, env, tags = {} if run_id else default_names(facts), os.environ.get, metrics.get("wandb_tags")
    found = {name: env(name, value) for name, value in DEFAULTS.items()}
    found["WANDB_PROJECT"] = metrics.get("wandb_project") or found["WANDB_PROJECT"]
    for key in ("name", "group"):
        variable = f"WANDB_RUN_{key.upper()}"
        found[variable] = metrics.get(f"wandb_{key}") or env(variable) or own.get(key)
    words = env("WANDB_RUN_TAGS") or env("WANDB_TAGS") or ",".join(own.get("tags", []))
    found["WANDB_TAGS"] = (words if tags is None else ",".join(tags)) or None
    if run_id:
        found |= {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"}
    return {name: value for name, value in found.items() if value is not None}


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def default_names(facts: dict) -> dict:
    """Return ``name``, ``group`` and ``tags``, of the run's model, converter, recipe and p.

    Runs of one model form a group: "llama3 125m". Their names tell them apart: "llama3 125m mxnorm mxfp8 p=1".
    """
    group, variant, converter = f"{facts['model']} {facts['flavor']}", variant_of(facts), facts["converter"]
    words = [variant] if converter == "none" else [converter, facts["recipe"]]
    if converter == "mxnorm":
        words.append("exact" if facts["estimator"] == "exact" else f"p={facts['p']}")
    tags = dict.fromkeys([facts["model"], facts["flavor"], *words])
    return {"name": f"{group} {variant}", "group": group, "tags": [tag[:LONGEST_TAG] for tag in tags]}


def sync_command(folder: Path, run_id: str) -> str | None:
    """Return the command that uploads all local folders of a wandb run, in their order. None if all are uploaded.

    Args:
        folder: of the training run.
    """
    found = folder.glob(f"**/offline-run-*/run-{glob.escape(run_id)}.wandb")
    places = [file.resolve().parent for file in found if not file.with_name(f"{file.name}.synced").exists()]
    places.sort(key=lambda place: (place.name, place))  # the name begins with the second, the folder with the minute
    words = [shlex.quote(str(place)) for place in places]
    return f"wandb sync {' '.join(words)}" if words else None


def wandb_facts(run, folder: Path) -> dict:
    """Return a run's ``mode`` (online, offline or disabled), ``id``, ``dir``, ``url`` and the ``sync`` command.

    Args:
        run: a ``wandb.Run``, or None for no run.
        folder: of the training run, where the folders of all starts are.
    """
    if run is None or run.disabled:
        return {"mode": "disabled", "id": None, "dir": None, "url": None, "sync": None}
    place = Path(run.dir).resolve().parent
    facts = {"mode": "offline" if run.offline else "online", "id": run.id, "dir": str(place), "url": None, "sync": None}
    return facts | ({"sync": sync_command(folder, run.id)} if run.offline else {"url": run.url})
