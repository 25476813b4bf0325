"""Build TorchTitan's tokenizer, data loader and validator from mxtrain's data.

``training.dataset`` and ``validation.dataset`` are "python", "files" or "hf" (see ``mxtrain.data``), or the name of a
dataset of TorchTitan, which TorchTitan's own code reads. An empty ``validation.dataset`` follows ``training.dataset``.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.components.validate import build_validator as build_titan_validator
from torchtitan.hf_datasets.text_datasets import DATASETS as TITAN_DATASETS
from torchtitan.tools.logging import logger

from mxtrain.data import DataConfig, Prepared, TokenFile, prepare
from mxtrain.data.config import DATASETS
from mxtrain.data.hub import readable
from mxtrain.data.local_files import LocalFiles
from mxtrain.data.progress import one_line
from mxtrain.data.token_dataset import TokenDataset
from mxtrain.data.tokenizer import load_tokenizer
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.titan.agreement import is_first, prepare_together, run_on_all_ranks
from mxtrain.titan.data.loader_workers import end_workers_at_exit, ignore_stop_signals
from mxtrain.titan.data.run_data import RunLoader, keep_in_run_folder, keep_stream_version, keep_validation_text
from mxtrain.titan.data.streams import Stream, held_out_share, training_stream, validation_stream
from mxtrain.titan.models.flavors import vocab_size
from mxtrain.titan.repairs.context_parallel import share_of_validation_loss
from mxtrain.titan.reports.terminal import note, note_progress


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
    name = job_config.training.dataset
    prepared = prepare_from_job(job_config)
    run_on_all_ranks(partial(keep_in_run_folder, job_config, prepared) if is_first() else None)
    if is_first() and infinite:
        note(f"text: {prepared.report.line}")
    if name in DATASETS and name != "hf":
        dataset = _token_dataset(job_config, "training", prepared.train, dp_rank, dp_world_size, infinite)
        if is_first() and infinite:
            _note_epochs(job_config, dataset)
    elif name == "hf":
        dataset = training_stream(job_config, tokenizer, dp_rank, dp_world_size, infinite)
        version = dataset.version
        run_on_all_ranks(partial(keep_stream_version, job_config, version) if is_first() and version else None)
    else:
        settings = job_config.training
        args = (name, settings.dataset_path, tokenizer, settings.seq_len, dp_rank, dp_world_size, infinite)
        with _opening("training", name, settings.dataset_path):
            dataset = Stream(*args)
    options = _loader_options(job_config.training)
    loader = RunLoader(dataset, dp_rank, dp_world_size, job_config=job_config, prepared=prepared, **options)
    end_workers_at_exit(loader)
    return loader


def build_validator(
    job_config, dp_world_size: int, dp_rank: int, tokenizer: HuggingFaceTokenizer, **parts
) -> BaseValidator:
    """Return a validator over held-out text. Takes the arguments of TorchTitan's ``build_validator``.

    Raises:
        ConfigError: as ``prepare_from_job`` and ``validation_stream``, and for too little held-out text for one batch
            per rank.
    """
    name = _validation_dataset(job_config)
    options = _loader_options(job_config.validation)
    parts["loss_fn"] = share_of_validation_loss(parts["loss_fn"], parts["parallel_dims"].cp)
    if name not in DATASETS:
        job_config = replace(job_config, validation=replace(job_config.validation, dataset=name))
        with _opening("validation", name, job_config.validation.dataset_path):
            return build_titan_validator(job_config, dp_world_size, dp_rank, tokenizer, **parts)
    if name == "hf":
        dataset = validation_stream(job_config, tokenizer, dp_rank, dp_world_size)
        if held_out_share(job_config):
            options |= {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
    else:
        # Finite for every validation.steps, so that each validation starts at the same text and losses compare.
        tokens = _held_out(job_config)
        dataset = _token_dataset(job_config, "validation", tokens, dp_rank, dp_world_size, infinite=False)
        sequences = dataset.samples(job_config.validation.steps)
        run_on_all_ranks(partial(keep_validation_text, job_config, tokens, sequences) if is_first() else None)
    # With a generator of its own, as in training: a resumed run does not repeat the validations before it.
    loader = ParallelAwareDataloader(dataset, dp_rank, dp_world_size, generator=torch.Generator(), **options)
    end_workers_at_exit(loader)
    return LoaderValidator(job_config, loader, tokenizer=tokenizer, **parts)


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
    return _prepare(_data_config(job_config), progress)


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

    return prepare_together(prepare_or_load, f"{config.setting('dataset')} = {config.dataset!r}")


def _titan_texts(name: str, path: str) -> Iterator[str]:
    """Read the texts of a dataset of TorchTitan."""
    dataset = TITAN_DATASETS[name]
    with _opening("training", name, path):
        rows = dataset.loader(path or dataset.path)
    return readable(map(dataset.sample_processor, rows), f"training.dataset = {name!r}")


@contextmanager
def _opening(section: str, name: str, path: str | None) -> Iterator[None]:
    """Turn a failure to open a dataset of TorchTitan into a ConfigError."""
    try:
        yield
    except Exception as error:  # loaders raise many types, most often for a missing file or network
        raise ConfigError(
            f"{section}.dataset = {name!r} cannot be opened at {path or TITAN_DATASETS[name].path!r}: "
            f"{type(error).__name__}: {one_line(error)}"
        ) from error


def _data_config(job_config) -> DataConfig:
    training, data = job_config.training, job_config.data
    tokenizer_path = job_config.model.hf_assets_path
    config = DataConfig(
        dataset=training.dataset,
        path=_path(job_config, "training", training.dataset),
        # An existing tokenizer has its own size; 0 keeps the model's size out of the cache key.
        vocab_size=0 if tokenizer_path else vocab_size(job_config),
        tokenizer_path=str(Path(os.path.expanduser(tokenizer_path)).absolute()) if tokenizer_path else "",
        installed=data.installed,
        other_files=data.other_files,
        max_bytes=data.max_bytes,
        package_share=data.package_share,
        validation_share=data.validation_share,
        seed=data.seed,
        text_key=data.text_key,
        hf_config=data.hf_config or "",
        stream_share=held_out_share(job_config),
        cache_dir=data.cache_dir,
        prepared=data.prepared,
        unseparated=data.unseparated,
    )
    return replace(config, cache_dir=str(config.cache_path()))  # resolved now: the environment may change


def _path(job_config, section: str, dataset: str) -> str:
    path = getattr(job_config, section).dataset_path or ""
    if path and dataset == "python":
        raise ConfigError(
            f"{section}.dataset_path = {path!r} does not apply to {section}.dataset = 'python', which reads this "
            "machine's standard library; for files of your own set it to 'files'"
        )
    return path


def _held_out(job_config) -> TokenFile:
    """Return the validation tokens: held out from the training text, or all tokens of files used only here."""
    training = _data_config(job_config)
    dataset = _validation_dataset(job_config)
    path = _path(job_config, "validation", dataset)
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
    files = [
        {os.path.realpath(entry.path) for entry in LocalFiles(config).listing}
        for config in (training, replace(training, path=path, section="validation"))
    ]
    common = files[0] & files[1]
    if common and files[0] != files[1] and is_first():
        logger.warning(
            f"validation.dataset_path = {path!r} has {len(common)} file(s) of training.dataset_path, on which the run "
            "trains"
        )
    return files[0] == files[1]


def _token_dataset(
    job_config, section: str, tokens: TokenFile, dp_rank: int, dp_world_size: int, infinite: bool
) -> TokenDataset:
    settings = getattr(job_config, section)
    return TokenDataset(
        tokens,
        seq_len=settings.seq_len,
        batch_size=settings.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        seed=job_config.data.seed,
        infinite=infinite,
        section=section,
    )


def _note_epochs(job_config, dataset: TokenDataset) -> None:
    """Tell the user, before training, that the run will read its text more than once."""
    training = job_config.training
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
    options = {**asdict(settings.dataloader), "batch_size": settings.local_batch_size}
    return {**options, "worker_init_fn": ignore_stop_signals}
