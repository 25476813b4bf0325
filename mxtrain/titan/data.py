"""Build TorchTitan's tokenizer and data loaders from mxtrain's data.

``training.dataset`` and ``validation.dataset`` are "python", "files" or "hf" (see ``mxtrain.data``). Training also
takes the name of a dataset of TorchTitan. An empty ``validation.dataset`` follows ``training.dataset``.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS as TITAN_DATASETS

from mxtrain.checkpoints.terminal import note
from mxtrain.data import DataConfig, Prepared, Tokens, prepare
from mxtrain.data.config import DATASETS, config_of, held_out_share, path_of
from mxtrain.data.loader import Loader, RunData, RunLoader, TokenDataset
from mxtrain.data.prepared import check_source, differences
from mxtrain.data.streams import Stream, stream_texts, training_stream, validation_stream
from mxtrain.data.tokenizer import load_tokenizer
from mxtrain.errors import ConfigError, raised_as, require_one_of
from mxtrain.ranks import from_first_rank, is_first, is_first_of_node, run_on_all_ranks
from mxtrain.titan.releases import engine


def build_tokenizer(job_config) -> HuggingFaceTokenizer:
    """Return the tokenizer in ``model.hf_assets_path``, or a tokenizer built from the training text."""
    folder, given = prepare_from_job(job_config).tokenizer, job_config.model.hf_assets_path
    # A prepared text may have a larger tokenizer than the model.
    setting = f"model.hf_assets_path = {given!r}" if given else f"data.prepared = {job_config.data.prepared!r}"
    _require_fitting_tokenizer(folder, job_config, setting)
    tokenizer = engine().hugging_face_tokenizer(str(folder))
    tokenizer.tokenizer, tokenizer.bos_id, tokenizer.eos_id, _ = load_tokenizer(folder)  # as for prepared text
    tokenizer.hf_adds_bos = tokenizer.hf_adds_eos = False
    return tokenizer


def check_data(job_config) -> None:
    """Raise ConfigError for a tokenizer or a text that the job cannot use, as far as this shows before it is read."""
    if given := job_config.model.hf_assets_path:
        _require_fitting_tokenizer(Path(os.path.expanduser(given)), job_config, f"model.hf_assets_path = {given!r}")
    training = _data_of(job_config)
    check_source(training)
    if not job_config.validation.enable:
        return
    dataset = validation_dataset(job_config)
    path = path_of(job_config, "validation", dataset)
    if dataset == "files" and (path or training.dataset != "files"):
        check_source(replace(training, dataset=dataset, path=path, section="validation", prepared=""))


def _require_fitting_tokenizer(folder: Path, job_config, setting: str) -> None:
    size, model_size = load_tokenizer(folder).size, engine().sizes_of(job_config)["vocab_size"]
    if size > model_size:
        raise ConfigError(f"{setting} has {size:,} tokens, the model {model_size:,}; set data.vocab_size = {size}")


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: HuggingFaceTokenizer, job_config) -> RunLoader:
    """Return the training data loader of one rank. A batch is ({"input": int64 [B, S]}, labels int64 [B, S]).

    Rank 0 keeps the identity of the data and the tokenizer in the run's folder.
    """
    training, rank = job_config.training, (dp_rank, dp_world_size)
    data = RunData(job_config, prepare_from_job(job_config))
    from_first_rank(data.keep)
    if is_first():
        note(f"text: {data.prepared.report.line}")
    dataset, version = _training_samples(job_config, tokenizer, rank)
    if version:
        from_first_rank(partial(data.keep_facts, stream_version=version))
    if is_first() and isinstance(dataset, TokenDataset):
        _note_epochs(training, dataset.chunks, dp_world_size)
    return RunLoader(dataset, rank, training, data)


def first_sequences(job_config, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first ``count`` sequences of the training text and their labels, int64 [B, S]."""
    dataset, _ = _training_samples(job_config, build_tokenizer(job_config), (0, 1))
    inputs, labels = zip(*islice(dataset, count))
    return torch.stack([row["input"] for row in inputs]), torch.stack(labels)


def _training_samples(job_config, tokenizer: HuggingFaceTokenizer, rank: tuple[int, int]):
    """The training text of one rank as samples, and the version of a streamed dataset, if it has one."""
    training = job_config.training
    if training.dataset == "hf":
        return training_stream(job_config, tokenizer, rank)
    if training.dataset in DATASETS:
        return TokenDataset(prepare_from_job(job_config).train, training, rank, job_config.data.seed), None
    rows, text_of = _titan_rows(training.dataset, training.dataset_path)
    stream = Stream(rows, text_of, tokenizer, training.seq_len, rank, infinite=True, name=training.dataset)
    return stream, None


def _note_epochs(training, chunks: int, ranks: int) -> None:
    """Tell the user, before training, that the run will read its text more than once."""
    # TorchTitan's default is -1: no accumulation of gradients.
    sequences = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * ranks
    asked, available = training.steps * sequences * training.seq_len, chunks * training.seq_len
    if asked > available:
        note(
            f"the text has {available:,} tokens, and {training.steps:,} steps take {asked:,}: it is read "
            f"{asked / available:.1f} times"
        )


def build_validation_loader(job_config, tokenizer: HuggingFaceTokenizer, rank: tuple[int, int]) -> Loader:
    name, validation = validation_dataset(job_config), job_config.validation
    if name == "hf":
        dataset = validation_stream(job_config, tokenizer, rank, note)
    else:
        # Finite for every validation.steps, so that each validation starts at the same text and losses compare.
        tokens = _held_out(job_config)
        dataset = TokenDataset(tokens, validation, rank, job_config.data.seed, infinite=False, section="validation")
        data = RunData(job_config, prepare_from_job(job_config))
        from_first_rank(partial(data.keep_facts, validation_text=tokens.sha256))
    options = {"num_workers": 0} if name == "hf" and held_out_share(job_config) else {}
    return Loader(dataset, validation, **options)


def prepare_from_job(job_config, progress: Callable[[str], None] = note) -> Prepared:
    """Build or load the tokenizer and the tokenized training text of a job, once per process and config.

    Under torch.distributed all ranks must call it. One rank of each node builds, and all check that they agree.

    ``progress`` is called with a line of text every few seconds while something is built.
    """
    check_datasets(job_config)
    return _prepare(_data_of(job_config), progress)


def _data_of(job_config) -> DataConfig:
    """The training text of a job, and the size of its model's vocabulary."""
    return config_of(job_config, engine().sizes_of(job_config)["vocab_size"])


def check_datasets(job_config) -> None:
    """Raise ConfigError unless the names of the job's datasets are known."""
    training, validation = job_config.training.dataset, job_config.validation
    require_one_of("training.dataset", training, dict.fromkeys([*DATASETS, *TITAN_DATASETS]))
    if not validation.enable:
        return
    if not validation.dataset and training not in DATASETS:
        raise ConfigError(
            f"validation.dataset = '' takes documents from training.dataset, but {training!r} is TorchTitan's; set "
            f"validation.dataset to one of: {', '.join(map(repr, DATASETS))}"
        )
    require_one_of("validation.dataset", validation_dataset(job_config), DATASETS)


def validation_dataset(job_config) -> str:
    """Return ``validation.dataset``, or if that is "", the dataset of training, which holds documents out for it."""
    return job_config.validation.dataset or job_config.training.dataset


@lru_cache(maxsize=8)
def _prepare(config: DataConfig, progress: Callable[[str], None]) -> Prepared:
    # Cached: a file edited while the job starts could otherwise give a tokenizer and tokens of different versions.
    setting = f"{config.section}.dataset = {config.dataset!r}"

    def titan_texts() -> Iterator[str]:
        return stream_texts(*_titan_rows(config.dataset, config.path), setting)

    stream, prepared = None if config.dataset in DATASETS else titan_texts, []

    def work() -> dict:
        prepared.append(prepare(config, progress, stream))
        return prepared[0].identity

    # The first rank of each node, whose progress is shown, prepares the text, and the others load it.
    first = run_on_all_ranks(work if is_first_of_node() else None)[0]

    def compare() -> None:
        if (own := prepared[0].identity if prepared else work()) != first["result"]:
            raise ConfigError(
                f"{setting} gives other data than on node {first['node']} ({differences(first['result'], own)}); give "
                "all nodes the same files and packages, or prepare the text once in a data.cache_dir that all nodes "
                "see, and name it in data.prepared"
            )

    run_on_all_ranks(compare)
    return prepared[0]


def _titan_rows(name: str, path: str | None) -> tuple[Iterable, Callable]:
    """Open a dataset of TorchTitan. Also return the function that takes the text out of a row."""
    dataset = TITAN_DATASETS[name]
    with raised_as(f"training.dataset = {name!r} cannot be opened at {path or dataset.path!r}"):
        return dataset.loader(path or dataset.path), dataset.sample_processor


def _held_out(job_config) -> Tokens:
    """Return the validation tokens: held out from the training text, or all tokens of files used only here."""
    training, prepared = _data_of(job_config), prepare_from_job(job_config)
    dataset = validation_dataset(job_config)
    path = path_of(job_config, "validation", dataset)
    places = {os.path.realpath(os.path.expanduser(one)) for one in (path or training.path, training.path)}
    if dataset == training.dataset and len(places) == 1:
        return prepared.validation
    # A prepared text is that of training.
    own = {"dataset": dataset, "path": path, "section": "validation", "prepared": ""}
    config = replace(training, **own, tokenizer_path=str(prepared.tokenizer))
    if dataset == "python":
        return _prepare(config, note).validation
    prepared = _prepare(replace(config, validation_share=0.0), note)
    if is_first():
        note(f"text for validation: {prepared.report.line}")
    return prepared.train
