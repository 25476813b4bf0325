"""Keeps the identity of a run's data in the run's folder, and refuses to resume with other data.

The run's folder gets ``data.json`` (hashes, also of the validation text, and the name of the prepared text) and a copy
of the tokenizer. Every checkpoint has the hashes in the state of the data loader.
"""

import json
import logging
import re
from pathlib import Path

from mxtrain.checkpoints.run_folder import DATA_FILE
from mxtrain.checkpoints.start import resumed_step
from mxtrain.data.config import held_out_share
from mxtrain.data.prepared import Prepared, differences
from mxtrain.data.tokenizer import copy_tokenizer
from mxtrain.errors import ConfigError
from mxtrain.files import read_json, replace_file

logger = logging.getLogger(__name__)

TOKENIZER_FOLDER = "tokenizer"
HELD_OUT = "held_out"
"""In an identity: share of a stream's documents that training does not read"""
EXCLUDE = 'checkpoint.exclude_from_loading = ["dataloader"]'

VALIDATION_LOSSES = "validation losses do not go on where they were"
OTHER_FACTS = {
    "validation_text": ("validation text", VALIDATION_LOSSES),
    "validation_sequences": ("number of sequences per validation", VALIDATION_LOSSES),
    "stream_version": (
        "version of the stream",
        f"the position in it may be in another text; set {EXCLUDE} to start at its beginning",
    ),
}
"""Facts in ``data.json`` that may change in a resumed run, with a warning -> their name, and the effect of a change.

``validation_text`` is the hash of the validation tokens, also where they are not of the training text;
``validation_sequences`` the number of sequences that one validation reads, on all ranks together; ``stream_version`` is
the version of a training stream (see ``open_stream``), which has no hash of its text.
"""


def read_record(folder: Path) -> dict | None:
    """Return what ``data.json`` in a run's folder holds (see ``RunData``), or None if it is missing or damaged."""
    try:
        kept = read_json(folder / DATA_FILE)
        return kept if {"tokenizer"} <= kept["identity"].keys() and {"prepared", "cache"} <= kept.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: the checkpoint has the hashes, too


class RunData:
    """The data of a run. Only rank 0 writes it into the run's folder.

    Every method that writes raises ConfigError if the folder cannot be written.
    """

    def __init__(self, job_config, prepared: Prepared):
        share, folder = held_out_share(job_config), prepared.folder
        self.prepared = prepared
        self.record = {
            "identity": prepared.identity | ({HELD_OUT: share} if share else {}),
            "prepared": folder.name if folder else None,
            "cache": str(folder.parent) if folder else None,
        }
        """What ``data.json`` and checkpoints hold, as a JSON value"""
        self.starts_anew = "dataloader" in job_config.checkpoint.exclude_from_loading
        """Whether the loader starts at the beginning of its text in a resumed run, too"""
        self._job = job_config
        self._folder = Path(job_config.job.dump_folder)

    def keep(self) -> None:
        """Write ``data.json`` and the tokenizer into the run's folder.

        If the folder has checkpoints, ``data.json`` goes on to name their data: a loader that starts anew with other
        data writes it with its first checkpoint. Without ``data.json`` the loader writes it, after the checkpoint has
        shown that the data is the same. Raises ConfigError for checkpoints of a run with other data.
        """
        checkpoint = self._job.checkpoint
        if checkpoint.enable and self._has_checkpoints():
            kept = read_record(self._folder)
            if kept is not None:
                self.require_same(kept)
            if self.starts_anew == (kept is not None):
                return
        elif checkpoint.enable and checkpoint.initial_load_path:
            self._warn_of_another_tokenizer(Path(checkpoint.initial_load_path))
        self.write()

    def _warn_of_another_tokenizer(self, checkpoint: Path) -> None:
        """Log a warning if a new run starts with weights that were trained with another tokenizer."""
        run = checkpoint.absolute().parent.parent  # RUN/checkpoint/step-N
        kept = read_record(run)
        if kept and checkpoint.name != "step-0" and kept["identity"]["tokenizer"] != self.prepared.tokenizer_sha256:
            logger.warning(
                f"checkpoint.initial_load_path = {str(checkpoint)!r} has weights that were trained with another "
                f"tokenizer; set model.hf_assets_path = {str(run / TOKENIZER_FOLDER)!r} to use it"
            )

    def write(self) -> None:
        """Write ``data.json`` and the tokenizer, with the other facts of the run so far."""
        before = (read_record(self._folder) if self._has_checkpoints() else None) or {}
        self._write(self.record | {key: before[key] for key in OTHER_FACTS if key in before})

    def _write(self, content: dict) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / DATA_FILE, (json.dumps(content, indent=2) + "\n").encode())
            copy_tokenizer(self.prepared.tokenizer, self._folder / TOKENIZER_FOLDER)
        except OSError as error:
            raise ConfigError(f"job.dump_folder = {str(self._folder)!r} cannot be written: {error}") from error

    def keep_facts(self, **facts: str) -> None:
        """Write some of OTHER_FACTS into ``data.json``, and warn if those of the run so far were others.

        A run that has no step left keeps what its validations have read. A stream that starts anew may be another one.
        """
        kept = read_record(self._folder)
        if kept is None:  # see ``keep``
            return
        for key, value in facts.items():
            (what, effect), before = OTHER_FACTS[key], kept.get(key)
            may_change = key == "stream_version" and self.starts_anew
            if before not in (None, value) and not may_change and self._has_checkpoints():
                logger.warning(
                    f"the {what} ({value[:12]}) is another than that of the run so far ({before[:12]}): {effect}"
                )
        if resumed_step(self._folder, self._job.checkpoint) < self._job.training.steps:
            self._write(kept | facts)

    def require_same(self, kept: dict) -> None:
        """Raise ConfigError if this run would go on with other data than the ``record`` of the run so far.

        A loader that starts at the beginning of its text (see EXCLUDE) may read another text, but needs the tokenizer.
        """
        before, after = kept["identity"], self.record["identity"]
        dataset, name, needed = self._job.training.dataset, kept["prepared"], before["tokenizer"]
        if self.starts_anew:
            before, after = {"tokenizer": needed}, {"tokenizer": after["tokenizer"]}
        elif (share := before.get(HELD_OUT, 0.0)) != (now := after.get(HELD_OUT, 0.0)):
            way = f"set validation.enable = true, validation.dataset = '' and data.validation_share = {share}"
            way = way if share else "set validation.dataset to a text of its own, or validation.enable = false"
            raise ConfigError(
                f"validation.dataset = {self._job.validation.dataset!r} holds a share of {now} of the documents out of "
                f"the training stream, but the run so far held out {share}: {way}; or set {EXCLUDE} to start anew"
            )
        if before == after:
            return
        ways = []
        if name and (Path(kept["cache"]) / name).is_dir():
            own = name.rpartition("-")[0]
            settings = "" if own == dataset else f"training.dataset = {own!r} and "
            ways.append(f"set {settings}data.prepared = {name!r} to go on with the run's own")
        elif name:
            ways.append(f"bring back the files of the run's own text, {name!r}, which is no longer in {kept['cache']}")
        tokenizer = f"model.hf_assets_path = {str(self._folder / TOKENIZER_FOLDER)!r}, the run's own tokenizer, and "
        tokenizer = "" if after["tokenizer"] == needed else tokenizer
        ways.append(f"set {tokenizer}{EXCLUDE} to start at the beginning of the new text")
        raise ConfigError(
            f"training.dataset = {dataset!r} gives other data than the run so far "
            f"({differences(before, after)}): {'; or '.join(ways)}"
        )

    def _has_checkpoints(self) -> bool:
        """Return whether the run's folder holds a checkpoint to resume from. Step 0 holds initial weights only."""
        found = (self._folder / self._job.checkpoint.folder).glob("step-*")
        return any(re.fullmatch(r"step-[1-9]\d*", path.name) for path in found)
