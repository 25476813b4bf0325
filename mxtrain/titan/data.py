"""Build TorchTitan's tokenizer, data loader and validator from mxtrain's data.

``training.dataset`` and ``validation.dataset`` are "python", "files" or "hf" (see ``mxtrain.data``), or the name of a
dataset of TorchTitan. An empty ``validation.dataset`` follows ``training.dataset``.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.components.validate import build_validator as build_titan_validator
from torchtitan.hf_datasets.text_datasets import DATASETS as TITAN_DATASETS
from torchtitan.tools.logging import logger

from mxtrain.checkpoints.reader import unpickle
from mxtrain.data import DataConfig, Prepared, TokenFile, prepare
from mxtrain.data.agreement import prepare_together
from mxtrain.data.config import DATASETS, config_of, held_out_share, path_of
from mxtrain.data.documents import raised_as
from mxtrain.data.hub import readable
from mxtrain.data.local_files import LocalFiles
from mxtrain.data.run_data import (
    EXCLUDE,
    keep_facts,
    keep_in_run_folder,
    record,
    require_same,
    starts_anew,
    write_record,
)
from mxtrain.data.streams import Stream, training_stream, validation_stream
from mxtrain.data.token_dataset import TokenDataset, end_workers_at_exit, ignore_stop_signals
from mxtrain.data.tokenizer import load_tokenizer
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.ranks import gather, is_first, run_on_all_ranks
from mxtrain.reports.terminal import note, note_progress
from mxtrain.titan.models.flavors import vocab_size
from mxtrain.titan.repairs.context_parallel import share_of_validation_loss


def build_tokenizer(job_config) -> HuggingFaceTokenizer:
    """Return the tokenizer in ``model.hf_assets_path``, or a tokenizer built from the training text.

    Raises:
        ConfigError: as ``prepare_from_job``, and for a tokenizer with more tokens than the model.
    """
    given = job_config.model.hf_assets_path
    if given:  # checked before a long text is tokenized
        folder = Path(os.path.expanduser(given)).absolute()
        run_on_all_ranks(partial(_require_fitting_tokenizer, folder, job_config, f"model.hf_assets_path = {given!r}"))
    folder = prepare_from_job(job_config).tokenizer
    if not given:  # a prepared text may have a larger one than the model
        setting = f"the tokenizer of data.prepared = {job_config.data.prepared!r}"
        _require_fitting_tokenizer(folder, job_config, setting)
    tokenizer = HuggingFaceTokenizer(str(folder))
    tokenizer.tokenizer, tokenizer.bos_id, tokenizer.eos_id, *_ = load_tokenizer(folder)  # as for prepared text
    tokenizer.hf_adds_bos = tokenizer.hf_adds_eos = False
    return tokenizer


def _require_fitting_tokenizer(folder: Path, job_config, setting: str) -> None:
    size, model_size = load_tokenizer(folder).size, vocab_size(job_config)
    if size > model_size:
        raise ConfigError(
            f"{setting} has {size:,} tokens, more than the model's {model_size:,}; set data.vocab_size to {size} or "
            "more"
        )


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: HuggingFaceTokenizer, job_config, infinite: bool = True
) -> ParallelAwareDataloader:
    """Return the training data loader of one rank. A batch is ({"input": int64 [B, S]}, labels int64 [B, S]).

    Rank 0 keeps the identity of the data and the tokenizer in the run's folder.

    Raises:
        ConfigError: as ``prepare_from_job``, for too little text for one batch per rank, and for a run's folder with
            checkpoints of other data.
    """
    training, rank = job_config.training, (dp_rank, dp_world_size)
    name, path = training.dataset, training.dataset_path
    prepared = prepare_from_job(job_config)
    _on_first_rank(keep_in_run_folder, job_config, prepared)
    if is_first() and infinite:
        note(f"text: {prepared.report.line}")
    if name == "hf":
        dataset, version = training_stream(job_config, tokenizer, rank, infinite)
        if version:
            _on_first_rank(keep_facts, job_config, stream_version=version)
    elif name in DATASETS:
        dataset = _token_dataset(job_config, "training", prepared.train, *rank, infinite)
        if is_first() and infinite:
            _note_epochs(training, dataset)
    else:
        rows, text_of = _titan_rows(name, path)
        dataset = Stream(rows, text_of, tokenizer, training.seq_len, rank, infinite, name)
    return RunLoader(dataset, *rank, job_config=job_config, prepared=prepared, **_loader_options(training))


def build_validator(
    job_config, dp_world_size: int, dp_rank: int, tokenizer: HuggingFaceTokenizer, **parts
) -> BaseValidator:
    """Return a validator over held-out text. Takes the arguments of TorchTitan's ``build_validator``.

    Raises:
        ConfigError: as ``prepare_from_job`` and ``validation_stream``, and for too little held-out text for one batch
            per rank.
    """
    name, validation = _validation_dataset(job_config), job_config.validation
    options = _loader_options(validation)
    parts["loss_fn"] = share_of_validation_loss(parts["loss_fn"], parts["parallel_dims"].cp)
    if name not in DATASETS:
        job_config = replace(job_config, validation=replace(validation, dataset=name))
        with _opening("validation", name, validation.dataset_path):
            return build_titan_validator(job_config, dp_world_size, dp_rank, tokenizer, **parts)
    if name == "hf":
        dataset = validation_stream(job_config, tokenizer, (dp_rank, dp_world_size), note_progress)
        if held_out_share(job_config):
            options |= {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
    else:
        # Finite for every validation.steps, so that each validation starts at the same text and losses compare.
        tokens = _held_out(job_config)
        dataset = _token_dataset(job_config, "validation", tokens, dp_rank, dp_world_size, infinite=False)
        sequences = str(dataset.samples(validation.steps))
        _on_first_rank(keep_facts, job_config, validation_text=tokens.sha256, validation_sequences=sequences)
    # With a generator of its own, as in training: a resumed run does not repeat the validations before it.
    loader = ParallelAwareDataloader(dataset, dp_rank, dp_world_size, generator=torch.Generator(), **options)
    end_workers_at_exit(loader)
    return LoaderValidator(job_config, loader, tokenizer=tokenizer, **parts)


def _on_first_rank(work: Callable, *args, **facts) -> None:
    run_on_all_ranks(partial(work, *args, **facts) if is_first() else None)


class LoaderValidator(Validator):
    """TorchTitan's Validator over a given loader.

    TorchTitan's ``__init__`` stores its arguments as attributes and builds a loader from its registry of datasets.
    This class stores the same attributes.
    """

    def __init__(self, job_config, loader: ParallelAwareDataloader, **parts):
        BaseValidator.__init__(self, job_config)
        self.validation_dataloader = loader
        self.pp_schedule = self.pp_has_first_stage = self.pp_has_last_stage = None
        vars(self).update(parts)

    def post_dataloading_process(self, input_dict, labels, model_parts):
        # DeepSeek V3 and Llama 4 make a mask for every attention, and then their "sdpa" attention refuses the mask.
        args = getattr(model_parts[0], "model_args", None)
        if getattr(args, "attn_type", "sdpa") not in ("flex", "varlen"):
            model_parts = [_ModelWithoutMasks]
        return super().post_dataloading_process(input_dict, labels, model_parts)


class _ModelWithoutMasks:
    @staticmethod
    def get_attention_masks(**inputs):
        raise TypeError("attention takes no mask")  # TorchTitan's validator expects this error


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
        self._is_stream = not isinstance(dataset, TokenDataset)
        end_workers_at_exit(self)

    def __iter__(self):
        if not self._is_stream:
            self.dataset.start = self._samples
            self._iterator = None  # workers of an earlier iteration, if they persist, start elsewhere
        for batch in super().__iter__():
            self._samples += self.batch_size * self.dp_world_size  # before the yield: the consumer has this batch
            yield batch

    def state_dict(self) -> dict:
        """Return the state. All ranks must call it at about the same time."""
        if starts_anew(self._job_config) and is_first():
            write_record(self._job_config, self._prepared)
        now = record(self._job_config, self._prepared)
        data, streams = {key: now[key] for key in ("identity", "prepared", "cache")}, b""
        if self._is_stream:
            # One value instead of a key per rank: with more ranks than before, DCP would look for missing keys.
            state = {"workers": self.num_workers, "state": StatefulDataLoader.state_dict(self)}
            states = dict(gather((self.dp_rank, pickle.dumps(state))))
            streams = pickle.dumps([states[rank] for rank in sorted(states)])
        else:
            data["order"] = self.dataset.order
        return {"samples": self._samples, "data": json.dumps(data), "streams": streams}

    def load_state_dict(self, state: dict) -> None:
        """Continue at the state of a checkpoint.

        Raises:
            ConfigError: the checkpoint is of a run with other data, or of a stream that other numbers of data-parallel
                ranks or workers read.
        """
        kept = json.loads(state["data"])
        require_same(kept, record(self._job_config, self._prepared), self._job_config)
        if self._is_stream:
            StatefulDataLoader.load_state_dict(self, self._own_stream(state["streams"]))
        else:
            self.dataset.require_order(kept["order"], f"set {EXCLUDE} to start at the beginning of the text")
        self._samples = state["samples"]
        if is_first():
            write_record(self._job_config, self._prepared)

    def _own_stream(self, content: bytes) -> dict:
        streams = unpickle(content, "the streams' states", {})
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


def prepare_from_job(job_config, progress: Callable[[str], None] = note_progress) -> Prepared:
    """Build or load the tokenizer and the tokenized training text of a job, once per process and config.

    Under torch.distributed all ranks must call it. One rank of each node builds, and all check that they agree.

    Args:
        progress: called with a line of text every few seconds while something is built.

    Raises:
        ConfigError: for an unknown dataset, a missing file, column or tokenizer, no text, or a value out of range;
            and if nodes have different data.
    """
    check_datasets(job_config)
    return _prepare(config_of(job_config, vocab_size(job_config)), progress)


def check_datasets(job_config) -> None:
    """Raise ConfigError unless the names of the job's datasets are known."""
    allowed = dict.fromkeys([*DATASETS, *TITAN_DATASETS])
    require_one_of("training.dataset", job_config.training.dataset, allowed)
    if not job_config.validation.enable:
        return
    if not (name := _validation_dataset(job_config)):
        raise ConfigError(
            f"validation.dataset = '' holds nothing out of training.dataset = {job_config.training.dataset!r}, which "
            f"is not mxtrain's: set it to one of: {', '.join(map(repr, allowed))}"
        )
    require_one_of("validation.dataset", name, allowed)


def _validation_dataset(job_config) -> str:
    """The dataset that is validated on: ``validation.dataset``, or if that is "", the one that the training leads to.

    Documents are held out of mxtrain's datasets, and TorchTitan's have a split of their own. It is "" for a dataset of
    the user's, of which nothing is known.
    """
    training, validation = job_config.training.dataset, job_config.validation.dataset
    if validation or training in DATASETS:
        return validation or training
    return "c4_validation" if training in ("c4", "c4_test", "c4_validation") else ""


@lru_cache(maxsize=8)
def _prepare(config: DataConfig, progress: Callable[[str], None]) -> Prepared:
    # Cached: a file edited while the job starts could otherwise give a tokenizer and tokens of different versions.
    stream = None if config.dataset in DATASETS else partial(_titan_texts, config.dataset, config.path)

    def prepare_or_load(folder: str) -> Prepared:
        if folder:  # a process of this node has prepared it, or read and hashed its tokens
            return prepare(replace(config, prepared=folder), progress, stream, reads_tokens=False)
        return prepare(config, progress, stream)

    return prepare_together(prepare_or_load, f"{config.section}.dataset = {config.dataset!r}")


def _titan_texts(name: str, path: str) -> Iterator[str]:
    """Read the texts of a dataset of TorchTitan."""
    rows, text_of = _titan_rows(name, path)
    return readable(map(text_of, rows), f"training.dataset = {name!r}")


def _titan_rows(name: str, path: str | None) -> tuple[Iterable, Callable]:
    """Open a dataset of TorchTitan. Also return the function that takes the text out of a row."""
    dataset = TITAN_DATASETS[name]
    with _opening("training", name, path):
        return dataset.loader(path or dataset.path), dataset.sample_processor


def _opening(section: str, name: str, path: str | None):
    """Turn a failure to open a dataset of TorchTitan into a ConfigError."""
    return raised_as(f"{section}.dataset = {name!r} cannot be opened at {path or TITAN_DATASETS[name].path!r}")


def _held_out(job_config) -> TokenFile:
    """Return the validation tokens: held out from the training text, or all tokens of files used only here."""
    training = config_of(job_config, vocab_size(job_config))
    dataset = _validation_dataset(job_config)
    path = path_of(job_config, "validation", dataset)
    if dataset == training.dataset and (path in ("", training.path) or _is_training_text(training, path)):
        return prepare_from_job(job_config).validation
    config = replace(
        training,
        dataset=dataset,
        path=path,
        tokenizer_path=str(prepare_from_job(job_config).tokenizer),
        prepared="",  # names the training text
        section="validation",
    )
    if dataset == "python":
        return _prepare(config, note_progress).validation
    prepared = _prepare(replace(config, validation_share=0.0), note_progress)
    if is_first():
        note(f"text for validation: {prepared.report.line}")
    return prepared.train


def _is_training_text(training: DataConfig, path: str) -> bool:
    """Whether a path of files for validation names the training text in other words. A part of it is a warning."""
    if training.dataset != "files" or training.prepared:
        return False
    own, other = (
        {os.path.realpath(entry.path) for entry in LocalFiles(config).listing}
        for config in (training, replace(training, path=path, section="validation"))
    )
    if own != other and (common := own & other) and is_first():
        logger.warning(
            f"validation.dataset_path = {path!r} has {len(common)} file(s) of training.dataset_path, on which the run "
            "trains"
        )
    return own == other


def _token_dataset(
    job_config, section: str, tokens: TokenFile, dp_rank: int, dp_world_size: int, infinite: bool
) -> TokenDataset:
    settings = getattr(job_config, section)
    size = (settings.seq_len, settings.local_batch_size)
    return TokenDataset(tokens, *size, dp_rank, dp_world_size, job_config.data.seed, infinite, section)


def _note_epochs(training, dataset: TokenDataset) -> None:
    """Tell the user, before training, that the run will read its text more than once."""
    sequences = training.global_batch_size
    if sequences < 0:  # TorchTitan's default: no accumulation of gradients
        sequences = training.local_batch_size * dataset.dp_world_size
    asked, available = training.steps * sequences * training.seq_len, dataset.chunks * training.seq_len
    if asked > available:
        note(
            f"the text has {available:,} tokens, and {training.steps:,} steps take {asked:,}: it is read "
            f"{asked / available:.1f} times"
        )


def _loader_options(settings) -> dict:
    batch = {"batch_size": settings.local_batch_size, "worker_init_fn": ignore_stop_signals}
    return asdict(settings.dataloader) | batch
