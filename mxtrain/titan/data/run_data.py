"""Keeps the identity of a run's data in the run's folder and in its checkpoints, and refuses to resume with other data.

The run's folder gets ``data.json`` (hashes, also of the validation text, the name of the prepared text in the
cache, and the settings) and a copy of the tokenizer. Every checkpoint has the hashes in the state of the data loader.
"""

import json
import pickle
import re
from dataclasses import asdict
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.tools.logging import logger

from mxtrain.checkpoints.reader import unpickle
from mxtrain.checkpoints.start import resumed_step
from mxtrain.data import Prepared
from mxtrain.data.token_dataset import TokenDataset
from mxtrain.data.token_store import TokenFile
from mxtrain.data.tokenizer import copy_tokenizer, tokenizer_hash
from mxtrain.errors import ConfigError
from mxtrain.files import replace_file
from mxtrain.json_toml import read_json
from mxtrain.ranks import gather, is_first
from mxtrain.run_folder.files import DATA_FILE
from mxtrain.titan.agreement import differences
from mxtrain.titan.data.streams import held_out_share

TOKENIZER_FOLDER = "tokenizer"
UNCHECKED = "whether this run goes on with the same text and tokenizer cannot be checked"
STREAM_SETTINGS = ("training.dataset", "training.dataset_path", "data.hf_config", "data.text_key")
HELD_OUT = "held_out"
"""In an identity: share of a stream's documents that training does not read"""
VALIDATION_TEXT = "validation_text"
"""In ``data.json``: hash of the tokens on which the run is validated, also where they are not of its training text"""
VALIDATION_SEQUENCES = "validation_sequences"
"""In ``data.json``: how many of its sequences one validation reads, on all ranks together"""
STREAM_VERSION = "stream_version"
"""In ``data.json``: ``OpenStream.version`` of a training stream, which has no hash of its text"""
EXCLUDE = 'checkpoint.exclude_from_loading = ["dataloader"]'


def record(job_config, prepared: Prepared) -> dict:
    """Return what is kept about the data of a run, as a JSON value."""
    training = job_config.training
    share = held_out_share(job_config)
    return {
        "identity": prepared.identity | ({HELD_OUT: share} if share else {}),
        "prepared": prepared.folder.name if prepared.folder else None,
        "cache": str(prepared.folder.parent) if prepared.folder else None,
        "settings": {
            "training.dataset": training.dataset,
            "training.dataset_path": training.dataset_path,
            "model.hf_assets_path": job_config.model.hf_assets_path,
            **{f"data.{name}": value for name, value in asdict(job_config.data).items()},
        },
    }


def keep_in_run_folder(job_config, prepared: Prepared) -> None:
    """Write ``data.json`` and the tokenizer into the run's folder. For rank 0.

    If the folder has checkpoints, ``data.json`` goes on to name their data: a loader that starts anew with other data
    writes it with its first checkpoint. Without ``data.json`` the loader writes it, after the checkpoint has shown that
    the data is the same.

    Raises:
        ConfigError: the folder has checkpoints of a run with other data, or cannot be written.
    """
    folder = Path(job_config.job.dump_folder)
    if job_config.checkpoint.enable and _has_checkpoints(folder / job_config.checkpoint.folder):
        kept = read_record(folder)
        if kept is not None:
            require_same(kept, record(job_config, prepared), job_config)
            if _starts_anew(job_config):
                return
            if prepared.train is None:
                _warn_of_another_stream(kept, record(job_config, prepared))
        elif not _starts_anew(job_config):
            return
        else:
            logger.warning(f"{folder} has checkpoints and no {DATA_FILE}: {UNCHECKED}")
    elif job_config.checkpoint.enable and job_config.checkpoint.initial_load_path:
        _warn_of_another_tokenizer(Path(job_config.checkpoint.initial_load_path), prepared)
    _write(job_config, prepared)


def _warn_of_another_stream(kept: dict, now: dict) -> None:
    """Log a warning if settings name another stream. Streamed text has no hash, and the same text may have moved."""
    before, after = kept.get("settings", {}), now["settings"]
    for name in STREAM_SETTINGS:
        if name in before and before[name] != after[name]:
            logger.warning(
                f"{name} = {after[name]!r}, but was {before[name]!r} in the run so far: if that is another text, set "
                f"{EXCLUDE} to start at its beginning"
            )


def _warn_of_another_tokenizer(checkpoint: Path, prepared: Prepared) -> None:
    """Log a warning if a new run starts with weights that were trained with another tokenizer."""
    run = checkpoint.absolute().parent.parent  # RUN/checkpoint/step-N
    kept = read_record(run)
    if kept is None or checkpoint.name == "step-0" or kept["identity"]["tokenizer"] == prepared.tokenizer_sha256:
        return
    logger.warning(
        f"checkpoint.initial_load_path = {str(checkpoint)!r} has weights that were trained with another tokenizer; "
        f"set model.hf_assets_path = {str(run / TOKENIZER_FOLDER)!r} to use it"
    )


def _write(job_config, prepared: Prepared) -> None:
    folder = Path(job_config.job.dump_folder)
    before = (read_record(folder) if _has_checkpoints(folder / job_config.checkpoint.folder) else None) or {}
    kept = {key: before[key] for key in (VALIDATION_TEXT, VALIDATION_SEQUENCES, STREAM_VERSION) if key in before}
    _write_file(folder, record(job_config, prepared) | kept, prepared.tokenizer)


def _write_file(folder: Path, content: dict, tokenizer: Path | None = None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / DATA_FILE, (json.dumps(content, indent=2) + "\n").encode())
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder / TOKENIZER_FOLDER)
    except OSError as error:
        raise ConfigError(f"job.dump_folder = {str(folder)!r} cannot be written: {error}") from error


def keep_validation_text(job_config, tokens: TokenFile, sequences: int) -> None:
    """Write which text a validation reads into ``data.json``, and warn if the run so far read another. For rank 0.

    A run that has no step left keeps what its validations have read.

    Args:
        tokens: the validation text.
        sequences: how many sequences one validation reads, on all ranks together.

    Raises:
        ConfigError: the run's folder cannot be written.
    """
    effect = "validation losses do not go on where they were"
    _keep(job_config, VALIDATION_TEXT, tokens.sha256, "validation text", effect)
    _keep(job_config, VALIDATION_SEQUENCES, str(sequences), "number of sequences per validation", effect)


def keep_stream_version(job_config, version: str) -> None:
    """Do the same for the version of the training stream. It may be another one if the stream starts anew."""
    effect = f"the position in it may be in another text; set {EXCLUDE} to start at its beginning"
    _keep(job_config, STREAM_VERSION, version, "version of the stream", effect, warns=not _starts_anew(job_config))


def _keep(job_config, key: str, value: str, what: str, effect: str, warns: bool = True) -> None:
    folder = Path(job_config.job.dump_folder)
    kept = read_record(folder)
    if kept is None:  # see ``keep_in_run_folder``
        return
    before = kept.get(key)
    if warns and before not in (None, value) and _has_checkpoints(folder / job_config.checkpoint.folder):
        logger.warning(
            f"the {what} ({value[:12]}) is another than that of the run so far ({str(before)[:12]}): {effect}"
        )
    if resumed_step(folder, job_config.checkpoint) < job_config.training.steps:
        _write_file(folder, kept | {key: value})


def require_same(kept: dict, now: dict, job_config) -> None:
    """Raise ConfigError if a run would go on with other data.

    A loader that starts at the beginning of its text (see EXCLUDE) may read another text, but needs the tokenizer.

    Args:
        kept, now: two values of ``record``: of the run so far, and of its continuation.
        job_config: the job config of the continuation.
    """
    if not _starts_anew(job_config):
        _require_same_share(kept, now, job_config)
    keys = ["tokenizer"] if _starts_anew(job_config) else kept["identity"].keys() | now["identity"].keys()
    before, after = ({key: value["identity"].get(key) for key in keys} for value in (kept, now))
    if before == after:
        return
    ways = [*_own_text(kept, job_config), *_other_text(kept, now, job_config)]
    raise ConfigError(
        f"training.dataset = {job_config.training.dataset!r} gives other data than the run so far "
        f"({differences(before, after)}): {'; or '.join(ways)}"
    )


def _require_same_share(kept: dict, now: dict, job_config) -> None:
    before, after = (value["identity"].get(HELD_OUT, 0.0) for value in (kept, now))
    if before == after:
        return
    way = (
        f"set validation.enable = true, validation.dataset = '' and data.validation_share = {before}"
        if before
        else "set validation.dataset to a text of its own, or validation.enable = false"
    )
    raise ConfigError(
        f"validation.dataset = {job_config.validation.dataset!r} holds a share of {after} of the documents out of the "
        f"training stream, but the run so far held out {before}: {way}; or set {EXCLUDE} to start at the beginning of "
        "the text"
    )


def _own_text(kept: dict, job_config) -> list[str]:
    """Return how to go on with the run's own text."""
    name, cache = kept["prepared"], kept["cache"]
    if name is None:
        return []
    if not (Path(cache) / name).is_dir():
        return [f"bring back the files of the run's own text, {name!r}, which is no longer in {cache} either"]
    dataset = name.rpartition("-")[0]
    settings = "" if dataset == job_config.training.dataset else f"training.dataset = {dataset!r} and "
    return [f"set {settings}data.prepared = {name!r} to go on with the run's own"]


def _other_text(kept: dict, now: dict, job_config) -> list[str]:
    """Return how to go on with the present text, which needs the run's tokenizer."""
    if now["identity"]["tokenizer"] == kept["identity"]["tokenizer"]:
        return [f"set {EXCLUDE} to start at the beginning of the new text"]
    tokenizer = Path(job_config.job.dump_folder) / TOKENIZER_FOLDER
    if tokenizer_hash(tokenizer) != kept["identity"]["tokenizer"]:
        return [f"set model.hf_assets_path to the run's own tokenizer and {EXCLUDE} to read the new text"]
    return [
        f"set model.hf_assets_path = {str(tokenizer)!r}, the run's own tokenizer, and {EXCLUDE} to read the new text"
    ]


def _starts_anew(job_config) -> bool:
    return "dataloader" in job_config.checkpoint.exclude_from_loading


def _has_checkpoints(folder: Path) -> bool:
    """Return whether ``folder`` holds a checkpoint to resume from. Step 0 holds initial weights only."""
    return any(re.fullmatch(r"step-[1-9]\d*", path.name) for path in folder.glob("step-*"))


def read_record(folder: Path) -> dict | None:
    """Return what ``data.json`` in a run's folder holds (see ``record``), or None if it is missing or damaged."""
    try:
        kept = read_json(folder / DATA_FILE)
        return kept if {"tokenizer"} <= kept["identity"].keys() and {"prepared", "cache"} <= kept.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: the checkpoint has the hashes, too


class RunLoader(ParallelAwareDataloader):
    """TorchTitan's data loader, whose state fits any layout of processes and names the data.

    The state has the same keys and values on all ranks. For tokenized text it is one number, the samples that all
    ranks have read. So a run may resume with other numbers of ranks and workers, and with another local batch size: it
    reads the samples that the uninterrupted run would have read. A stream has one state per rank instead.

    Batches count when the consumer gets them, not when a worker has prepared them.

    Args:
        prepared: the data of this run.
        The other arguments are those of ParallelAwareDataloader.
    """

    def __init__(self, dataset, dp_rank: int, dp_world_size: int, *, job_config, prepared: Prepared, **options):
        # With a generator of its own, because every iteration draws a number: a resumed run has one iteration more.
        super().__init__(dataset, dp_rank, dp_world_size, generator=torch.Generator(), **options)
        self._job_config = job_config
        self._prepared = prepared
        self.tokenizer_sha256 = prepared.tokenizer_sha256
        self._samples = 0

    def __iter__(self):
        if not self._is_stream:
            self.dataset.start = self._samples
            self._iterator = None  # workers of an earlier iteration, if they persist, start elsewhere
        for batch in super().__iter__():
            self._samples += self.batch_size * self.dp_world_size  # before the yield: the consumer has this batch
            yield batch

    @property
    def _is_stream(self) -> bool:
        return not isinstance(self.dataset, TokenDataset)

    def state_dict(self) -> dict:
        """Return the state. All ranks must call it at about the same time."""
        if _starts_anew(self._job_config) and is_first():
            _write(self._job_config, self._prepared)
        now = record(self._job_config, self._prepared)
        data = {key: now[key] for key in ("identity", "prepared", "cache")}
        if not self._is_stream:
            data["order"] = self.dataset.order
        return {"samples": self._samples, "data": json.dumps(data), "streams": self._streams()}

    def _streams(self) -> bytes:
        """Return the states of all data-parallel ranks' streams, in the order of these ranks."""
        if not self._is_stream:
            return b""
        # One value instead of a key per rank: with more ranks than before, DCP would look for keys that do not exist.
        state = {"workers": self.num_workers, "state": StatefulDataLoader.state_dict(self)}
        return pickle.dumps([state for _, state in sorted(dict(gather((self.dp_rank, pickle.dumps(state)))).items())])

    def load_state_dict(self, state: dict) -> None:
        """Continue at the state of a checkpoint.

        Raises:
            ConfigError: the checkpoint is of a run with other data, or of a stream that other numbers of data-parallel
                ranks or workers read.
        """
        kept = json.loads(state["data"])
        require_same(kept, record(self._job_config, self._prepared), self._job_config)
        if self._is_stream:
            streams = unpickle(state["streams"], "the streams' states", {})
            StatefulDataLoader.load_state_dict(self, self._own_stream(streams))
        else:
            self._require_order(kept["order"])
        self._samples = state["samples"]
        if is_first():
            _write(self._job_config, self._prepared)

    def _require_order(self, before: dict[str, int]) -> None:
        for name, value in self.dataset.order.items():
            if value != before[name]:
                raise ConfigError(
                    f"{name} = {value}, but was {before[name]} in the run so far, whose position in the training text "
                    f"has no meaning in another order: set it to {before[name]}, or set {EXCLUDE} to start at the "
                    "beginning of the text"
                )

    def _own_stream(self, streams: list[bytes]) -> dict:
        ways = f"or set {EXCLUDE} to start at the beginning of the text"
        if len(streams) != self.dp_world_size:
            raise ConfigError(
                f"training.dataset = {self._job_config.training.dataset!r} is a stream, in which each data-parallel "
                f"rank has a position: the checkpoint has {len(streams)} rank(s) and this run {self.dp_world_size}; "
                f"start as many, {ways}"
            )
        stream = unpickle(streams[self.dp_rank], "the stream's state", {})
        if stream["workers"] != self.num_workers:
            raise ConfigError(
                f"training.dataloader.num_workers = {self.num_workers}, but was {stream['workers']} in the run so far, "
                f"and each worker has a position in the stream: set it to {stream['workers']}, {ways}"
            )
        return stream["state"]
