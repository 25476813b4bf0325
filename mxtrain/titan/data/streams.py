"""Streams of the Hugging Face hub: for training, for validation, and held-out documents of one stream for both."""

from functools import partial

from torch.utils.data import IterableDataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS as TITAN_DATASETS
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from mxtrain.data.hub import StreamedText, hold_out, open_stream
from mxtrain.errors import ConfigError
from mxtrain.reports.terminal import note_progress


class Stream(HuggingFaceTextDataset):
    """TorchTitan's dataset, which resumes where it stopped in every pass over the text, in worker processes, too."""

    _resumed: dict | None = None
    """The state from which no document has been read yet: ``datasets`` would name the beginning"""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._resumed = state_dict.get("data")
        if self._resumed is not None:
            # ``datasets`` drops the state of another epoch. ``set_epoch`` would set that of all workers.
            self._data._epoch = self._resumed["epoch"]

    def state_dict(self):
        state = super().state_dict()
        state["token_buffer"] = list(self._token_buffer)  # it grows while another thread sends the state
        if self._resumed is not None:
            state["data"] = self._resumed
        return state

    def _get_data_iter(self):
        self._resumed = None
        return super()._get_data_iter()


def held_out_share(job_config) -> float:
    """Return the share of the training stream's documents that validation holds out; 0 if it reads another text."""
    return job_config.data.validation_share if job_config.validation.enable and _shares_stream(job_config) else 0.0


def _shares_stream(job_config) -> bool:
    """Whether validation, where it is enabled, reads the stream that training reads."""
    training, validation = job_config.training, job_config.validation
    is_same = not validation.dataset and validation.dataset_path in (None, "", training.dataset_path)
    return training.dataset == "hf" and is_same


def training_stream(job_config, tokenizer, dp_rank: int, dp_world_size: int, infinite: bool) -> Stream:
    """Return one rank's part of the training stream, without the documents that validation holds out.

    Raises ConfigError if some of the data loader's workers would have nothing to read.
    """
    choose = partial(hold_out, text_key=job_config.data.text_key, share=held_out_share(job_config), held_out=False)
    path = job_config.training.dataset_path or ""
    stream = _stream(job_config, "training", path, "train", tokenizer, dp_rank, dp_world_size, infinite, choose)
    _require_files_for_workers(job_config, "training", stream)
    return stream


def validation_stream(job_config, tokenizer, dp_rank: int, dp_world_size: int) -> IterableDataset:
    """Return one rank's part of the documents held out of the training stream, or of another stream's validation split.

    Raises:
        ConfigError: with ``validation.steps = -1``, if the end of the stream is too far away, or reached by ranks at
            different steps; if no document is held out; and if some of the data loader's workers would have nothing
            to read.
    """
    settings, data = job_config.validation, job_config.data
    rank = (dp_rank, dp_world_size)
    training_path = job_config.training.dataset_path if job_config.training.dataset == "hf" else ""
    path = settings.dataset_path or training_path or ""
    is_held_out = _shares_stream(job_config)
    if settings.steps == -1 and (is_held_out or dp_world_size > 1):
        raise ConfigError(
            "validation.steps = -1 reads validation.dataset = 'hf' to its end, which may be far away, and which "
            "data-parallel ranks reach at different steps; set validation.steps to a positive number"
        )
    if not is_held_out:
        stream = _stream(job_config, "validation", path, "validation", tokenizer, *rank, infinite=settings.steps != -1)
        _require_files_for_workers(job_config, "validation", stream)
        if settings.steps == -1 or settings.dataloader.num_workers:
            return stream
        # Without workers the stream would go on where the validation before has ended.
        return _FirstSequences(stream, settings.steps * settings.local_batch_size, f"the split at {path!r} has")
    if data.validation_share == 0:
        raise ConfigError(
            f"data.validation_share = 0 holds no document out of training.dataset_path = {path!r} for validation: "
            "raise it, or set validation.dataset"
        )
    choose = partial(hold_out, text_key=data.text_key, share=data.validation_share, held_out=True)
    stream = _stream(job_config, "validation", path, "train", tokenizer, *rank, infinite=False, choose=choose)
    share = f"data.validation_share = {data.validation_share} holds out"
    return _FirstSequences(stream, settings.steps * settings.local_batch_size, share)


def _require_files_for_workers(job_config, section: str, stream: Stream) -> None:
    """Every worker reads files of its own. TorchTitan's loop over a stream without any would never end."""
    workers, files = getattr(job_config, section).dataloader.num_workers, stream._data.num_shards
    if workers > files:
        raise ConfigError(
            f"{section}.dataloader.num_workers = {workers}: a data-parallel rank reads {files} file(s) of this stream, "
            f"one worker each; allowed is {files} or less"
        )


class _FirstSequences(IterableDataset):
    """The first sequences of a stream, which is read once: every validation is of the same text, and of a stream with
    few documents that are held out all are downloaded.

    A stream with fewer sequences is repeated, so that all ranks have as many. No worker process may read it, which
    would end with what it has read.
    """

    def __init__(self, stream: Stream, count: int, source: str):
        self._stream = stream
        self._count = count
        self._source = source
        self._sequences = []

    def __iter__(self):
        if not self._sequences:
            note_progress("reading the documents of the stream for validation")
        while len(self._sequences) < self._count:
            before = len(self._sequences)
            for sequence in self._stream:
                self._sequences.append(sequence)
                if len(self._sequences) == self._count:
                    break
            if len(self._sequences) == before:
                raise ConfigError(
                    f"{self._source} less text than one sequence of validation.seq_len = {self._stream.seq_len} per "
                    "data-parallel rank: take more text, or lower validation.seq_len"
                )
        return iter(self._sequences)


def _stream(
    job_config, section: str, path: str, split: str, tokenizer, dp_rank: int, dp_world_size: int, infinite: bool,
    choose=lambda stream: stream,
) -> Stream:  # fmt: skip
    """Build TorchTitan's streaming dataset, which finds its source in a registry: register this job's for the call.

    Args:
        choose: called with the whole stream, returns the one to read.

    Returns:
        The dataset; its attribute ``version`` is that of ``OpenStream``.
    """
    data = job_config.data
    stream = open_stream(path, hf_config=data.hf_config or "", split=split, section=section)
    source = DatasetConfig(path, lambda path: choose(stream.rows), StreamedText(data.text_key, path))
    TITAN_DATASETS["hf"] = source
    try:
        seq_len = getattr(job_config, section).seq_len
        dataset = Stream("hf", path, tokenizer, seq_len, dp_rank, dp_world_size, infinite)
    finally:
        del TITAN_DATASETS["hf"]
    dataset.version = stream.version
    return dataset
