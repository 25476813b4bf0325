"""Logs a run to wandb without letting wandb stop or block it.

Without credentials, or if wandb's server does not answer in time, the run is offline: it records the same data for
``wandb sync``. WANDB_MODE, WANDB_SILENT and wandb's other settings stay as the user set them.

``run.json`` keeps the id of the wandb run. A resumed run starts wandb with this id and resume = "allow", so that a
server appends to the run. Offline, every start makes a local folder with the same id, and ``wandb sync`` of all of
them uploads one run (wandb 0.31). A first part that is uploaded last would replace all others, so a run stays offline
until its earlier parts are uploaded. wandb's history only grows, so steps that wandb has are not sent again.
"""

import glob
import logging
import os
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mxtrain.analysis.metrics_file import NUMERICS, read_metrics
from mxtrain.analysis.numerics import draw_numerics, wandb_key
from mxtrain.analysis.plots import plot
from mxtrain.analysis.runs import load_run, variant_of
from mxtrain.errors import ConfigError
from mxtrain.json_toml import read_json
from mxtrain.run_folder import files

logger = logging.getLogger()  # TorchTitan's

TIMEOUTS = {"init_timeout": 30.0, "finish_timeout": 120.0}
"""
Seconds that wandb waits for its server at the start, after which the run is offline, and for the upload at the end. The
environment variables WANDB_INIT_TIMEOUT and WANDB_FINISH_TIMEOUT set others
"""
PROJECT = "mxtrain"
LONGEST_TAG = 64
"""Characters that wandb allows"""
TOKENS = "n_tokens_seen"
BY_TOKENS = ("loss_metrics/*", "validation_metrics/loss", "grad_norm", "lr")
"""Metrics whose charts have the tokens seen as their x-axis"""
ATTACHED = (files.CONFIG_FILE, files.FACTS_FILE, files.CONVERSION_FILE, files.PICTURE_FILE, files.NUMERICS_FILE)
USERS_CHOICES = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")
"""Variables by which the user decides which wandb run continues"""


class EarlierRun(NamedTuple):
    """The wandb run of a run so far."""

    id: str
    last_step: int
    """The last logged step"""


def earlier_run(folder: Path) -> EarlierRun | None:
    """Return the wandb run of the run in ``folder``. None if it has none, or none whose files can be read."""
    try:
        run_id = read_json(folder / files.FACTS_FILE)["wandb"]["id"]
        last_step = max(row["step"] for row in read_metrics(folder / files.METRICS_FILE))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return EarlierRun(run_id, last_step) if isinstance(run_id, str) and run_id else None


class WandbLogger:
    """Logs TorchTitan's metrics and a run's files. A failure of wandb after the start is one warning."""

    def __init__(
        self,
        place: Path,
        job: dict,
        metrics,
        facts: dict,
        folder: Path,
        attaches: bool = True,
        continued: EarlierRun | None = None,
    ):
        """Start wandb. Raises whatever wandb raises for wrong settings, such as WANDB_MODE = "sideways".

        Args:
            place: folder for wandb's own files.
            job: the sections of the job config, of which ``metrics`` is one.
            facts: of the run, as in run.json.
            folder: of the run, whose files are attached.
            continued: the wandb run so far, which this one continues unless the user has chosen another one.
        """
        import wandb

        self.folder, self.attaches = folder, attaches
        self.last_step, self.tokens_per_step, self.has_files, self.has_failed = 0, 0.0, False, False
        place.mkdir(parents=True, exist_ok=True)
        if any(os.environ.get(name) for name in USERS_CHOICES):
            continued = None
        settings = wandb.setup().settings
        arguments = wandb_names(metrics, facts, settings, continued is not None)
        if continued is not None:
            arguments |= {"id": continued.id, "resume": settings.resume or "allow"}
        stays_offline = continued is not None and sync_command(folder, continued.id) is not None
        self.run = start_run(stays_offline, dir=place, config=job, **arguments)
        if continued is not None and not self.run.disabled:
            # A server knows which steps have reached it.
            self.last_step = self.run.starting_step - 1 if self.run.resumed else continued.last_step
        # The sections of the job config keep their names.
        self.run.config.update({key: value for key, value in facts.items() if key not in job}, allow_val_change=True)
        self.run.define_metric(TOKENS)
        for name in BY_TOKENS:
            self.run.define_metric(name, step_metric=TOKENS)

    def log(self, metrics: dict, step: int) -> None:
        if step <= self.last_step:
            return
        if TOKENS in metrics:
            self.tokens_per_step = metrics[TOKENS] / step
        elif self.tokens_per_step:  # a validation
            metrics = {**metrics, TOKENS: round(self.tokens_per_step * step)}
        row = {wandb_key(name) if name.startswith(NUMERICS) else name: value for name, value in metrics.items()}
        self._try(lambda: self.run.log(row, step=step))
        if not self.has_files:  # all of them are there, and those that change later are attached again at the end
            self.has_files = True
            self._try(self._attach)

    def log_event(self, step: int, text: str) -> None:
        """Log a text with a step, in the column "event"; the run's summary keeps the last one."""
        if step > self.last_step:
            self._try(lambda: self.run.log({"event": text}, step=step))

    def close(self) -> None:
        if self.attaches and not self.run.disabled:
            self._try(self._draw)
            self._try(self._attach)
        try:
            self.run.finish()
        except TimeoutError:
            place = Path(self.run.dir).resolve().parent
            logger.warning(f"wandb's server did not take everything in time; upload the rest with: wandb sync {place}")
        except Exception as error:
            self._warn(error)

    def _draw(self) -> None:
        """Draw the loss curve and the figures of diagnostics, each if the run has any and they can be written."""
        with suppress(ConfigError):
            run = load_run(self.folder)
            plot([run], self.folder / files.PICTURE_FILE)
            draw_numerics(run, self.folder / files.NUMERICS_FILE)

    def _attach(self) -> None:
        """Upload copies of the run's files as ``mxtrain/NAME``.

        The copies are in wandb's folder, so that an offline run is uploaded whole after its folder has moved.
        """
        if not self.attaches or self.run.disabled:
            return
        place = Path(self.run.dir) / "mxtrain"
        place.mkdir(exist_ok=True)
        for name in ATTACHED:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, place / name)
                self.run.save(str(place / name), base_path=self.run.dir, policy="now")

    def _try(self, action) -> None:
        try:
            action()
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self.has_failed:
            logger.warning(f"wandb failed: {first_line(error)}; training goes on, and metrics are in metrics.jsonl")
        self.has_failed = True


def start_run(stays_offline: bool = False, **arguments):
    """Return ``wandb.init(**arguments)``, silent, and offline where it cannot be online.

    Args:
        stays_offline: do not go online, unless WANDB_MODE says so.

    Raises whatever wandb raises for wrong settings.
    """
    import wandb

    # wandb reads the environment only once per process, so settings change through wandb.setup.
    choices = {name: seconds for name, seconds in TIMEOUTS.items() if f"WANDB_{name.upper()}" not in os.environ}
    if "WANDB_SILENT" not in os.environ:
        choices["silent"] = True  # the summary says where the run is
    wandb.setup(settings=wandb.Settings(**choices, finish_timeout_raises=True))
    mode = wandb.setup().settings.mode
    if mode == "online" and stays_offline and "WANDB_MODE" not in os.environ:
        mode = "offline"
    if mode == "online":
        try:
            if wandb.login(verify=False, prompt=False):
                return wandb.init(**arguments)
        except Exception as error:
            logger.warning(f"wandb cannot be online: {first_line(error)}; the run is offline")
        mode = "offline"
    wandb.setup(settings=wandb.Settings(mode=mode))
    return wandb.init(**arguments)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def wandb_names(metrics, facts: dict, settings, continues: bool) -> dict:
    """Return the arguments ``entity``, ``project``, ``name``, ``group``, ``tags``, ``notes`` and ``job_type``.

    Each comes from the first of these that says something: the section [metrics], TorchTitan's environment variables,
    wandb's settings (environment and files), the run's own facts. wandb itself reads its settings for None. A run that
    continues keeps the name, group and tags that it has on the server, where a user may have changed them.

    Args:
        metrics: the section of the job config. Without mxtrain's config module it has no settings of wandb.
        facts: of the run, as in run.json.
        settings: a ``wandb.Settings``.
        continues: whether an earlier start of this run has named the wandb run.
    """
    project, name, group, tags = (getattr(metrics, f"wandb_{k}", None) for k in ("project", "name", "group", "tags"))
    default = {} if continues else default_names(facts)
    env = os.environ.get
    if tags is None:
        words = [word.strip() for word in env("WANDB_RUN_TAGS", "").split(",") if word.strip()]
        tags = words or settings.run_tags or default.get("tags")
    return {
        "entity": env("WANDB_TEAM"),
        "project": project or settings.project or PROJECT,
        "name": name or env("WANDB_RUN_NAME") or settings.run_name or default.get("name"),
        "group": group or settings.run_group or default.get("group"),
        "tags": tags,
        "notes": env("WANDB_RUN_NOTES"),
        "job_type": env("WANDB_RUN_JOB_TYPE"),
    }


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
