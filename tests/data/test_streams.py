import itertools
import json
import os
import re
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets as hf_datasets
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import mxtrain.titan  # noqa: F401  (points TorchTitan at this machine's device)
from mxtrain.data import DataConfig, prepare, streams
from mxtrain.data import loader as data_loader
from mxtrain.data.documents import TextColumn, is_held_out
from mxtrain.data.streams import (
    PATIENCE_ROWS,
    Stream,
    hub_texts,
    is_on_side,
    open_stream,
    stream_texts,
)
from mxtrain.data.tokenizer import train_tokenizer
from mxtrain.errors import ConfigError
from mxtrain.titan import data as titan_data
from mxtrain.titan.data import build_dataloader, build_tokenizer, prepare_from_job
from tests.support.data_checks import VOCABULARY, job, rows_of, same, take, text, validation_loader


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A folder of the test's own for ./outputs and the cache of ``datasets``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hf_datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


TITAN_NAMES = {"c4", "c4_test", "c4_validation"}
READ = []
"""The rows that this process has read"""
VERSION = {"some/set": "c0ffee"}
"""Of the one dataset on the hub"""


def rows(shards, split):
    for shard in shards:
        for i in range(60):
            READ.append((shard, i))
            yield {"body": text(1000 * shard + i + (500_000 if split == "validation" else 0), 40), "url": "u"}


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds one dataset, some/set, with two shards a split."""
    opened = []

    def load_dataset_builder(path, name):
        if path != "some/set":
            raise FileNotFoundError(f"Dataset {path} does not exist")

        def as_streaming_dataset(split):
            opened.append((name, split))
            return hf_datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1], "split": split})

        return SimpleNamespace(as_streaming_dataset=as_streaming_dataset, hash=VERSION[path])

    monkeypatch.setattr(hf_datasets, "load_dataset_builder", load_dataset_builder)
    return opened


def hf_job(*flags):
    own = ("--training.dataset=hf", "--training.dataset_path=some/set", "--data.hf_config=en", "--data.text_key=body")
    return job(*own, *flags)


def test_a_stream_trains_a_tokenizer_and_feeds_the_loader(hub):
    config = hf_job()
    tokenizer = build_tokenizer(config)
    assert tokenizer.get_vocab_size() == VOCABULARY and hub == [("en", "train")]
    assert prepare_from_job(config).report.streamed
    inputs, labels = take(build_dataloader(1, 0, tokenizer, config), 1)[0]
    assert torch.equal(inputs["input"][0], torch.tensor(tokenizer.encode(text(0, 40), add_bos=True, add_eos=True)[:16]))
    assert inputs["input"].shape == labels.shape == (4, 16)
    assert set(titan_data.TITAN_DATASETS) == TITAN_NAMES  # TorchTitan's registry is as it was


@pytest.mark.parametrize("tokens_in", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_stream_has_the_tokens_of_a_prepared_text(hub, tmp_path, tokens_in):
    """Whatever the tokenizer's files tell other programs to cut, to pad and to add."""
    folder = tmp_path / "tokenizer"
    train_tokenizer([text(0)], VOCABULARY, folder, print)
    (folder / "tokenizer_config.json").rename(folder / tokens_in)
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoder.enable_truncation(4)
    encoder.enable_padding(length=300)
    added = [("<|end_of_text|>", 1)]
    encoder.post_processor = TemplateProcessing(single="$A <|end_of_text|>", special_tokens=added)
    encoder.save(str(folder / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(text(1))
    config = DataConfig("files", str(tmp_path / "a.txt"), tokenizer_path=str(folder), validation_share=0.0)
    prepared = prepare(config, lambda line: None)
    job = hf_job(f"--model.hf_assets_path={folder}")
    ids = build_tokenizer(job).encode(text(1), add_bos=True, add_eos=True)
    assert ids == prepared.train[:].tolist() and ids.count(0) == ids.count(1) == 1 and len(ids) > 300
    assert (
        prepare_from_job(job).report.line
        == "streamed; each document begins with '<|begin_of_text|>' and ends with '<|end_of_text|>'"
    )


def test_a_run_keeps_the_version_of_its_stream(hub):
    config = hf_job("--checkpoint.enable")
    loader = build_dataloader(1, 0, build_tokenizer(config), config)
    take(loader, 1)
    loader.load_state_dict(loader.state_dict())
    assert json.loads(Path(config.job.dump_folder, "data.json").read_text())["stream_version"] == "c0ffee"


def require_exact_resume(config, tokenizer, stop, end):
    """A stream that stops after ``stop`` batches and resumes has the batches up to ``end`` of one that does not."""
    whole = take(build_dataloader(1, 0, tokenizer, config), end)
    stopped = build_dataloader(1, 0, tokenizer, config)
    take(stopped, stop)
    resumed = build_dataloader(1, 0, tokenizer, config)
    resumed.load_state_dict(stopped.state_dict())
    assert same(take(resumed, end - stop), whole[stop:])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_resumes_exactly_in_its_second_pass(hub, workers):
    """datasets drops the state of another epoch, and knows no position before it is read again."""
    config = hf_job(f"--training.dataloader.num_workers={workers}", "--training.local_batch_size=16")
    tokenizer = build_tokenizer(config)
    texts = [text(1000 * shard + i, 40) for shard in (0, 1) for i in range(60)]
    pass_ends = sum(len(tokenizer.encode(one, add_bos=True, add_eos=True)) for one in texts) // (16 * 17)
    whole = take(build_dataloader(1, 0, tokenizer, config), pass_ends + 6)
    state, done = None, 0
    for count in (pass_ends + 1, 1, 4):  # of two workers, one reads the single batch
        loader = build_dataloader(1, 0, tokenizer, config)
        if state:
            loader.load_state_dict(state)
        assert same(take(loader, count), whole[done : done + count])
        state, done = loader.state_dict(), done + count


def on_ranks(config, tokenizer, ranks: int, state: dict | None, count: int, monkeypatch) -> tuple[list, dict]:
    """Return the next ``count`` samples of a stream that ``ranks`` ranks read, in their order, and the state then."""
    loaders, batches, states = [build_dataloader(ranks, rank, tokenizer, config) for rank in range(ranks)], [], []
    for loader in loaders:
        if state:
            loader.load_state_dict(state)
        batches.append([row for batch in take(loader, count // ranks // 4) for row in batch[1].tolist()])
        monkeypatch.setattr(data_loader, "gather", lambda value: states.append(value) or states)
        state_then = loader.state_dict()
    return [batches[i % ranks][i // ranks] for i in range(count)], state_then


def letters(rows, rank=(0, 1), **options) -> Stream:
    """A stream of samples of two tokens, one for each letter."""
    encode = SimpleNamespace(encode=lambda text, **tokens: list(map(ord, text)))
    return Stream(rows, itemgetter("text"), encode, 2, rank, infinite=True, **options)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_rows_resume_after_every_sample(is_streamed):
    """datasets cannot skip all rows, and the last one has several samples. Streamed rows are those of Arrow tables."""
    texts = [chr(97 + i % 26) * (1 + i % 7) for i in range(10)] + ["long" * 5]
    rows = hf_datasets.Dataset.from_dict({"text": texts})
    rows, options = (rows.to_iterable_dataset() if is_streamed else rows), {"keeps": lambda row: "h" not in row["text"]}
    whole = [labels.tolist() for _, labels in take(letters(rows, **options), 30)]
    for stop in range(len(whole) - 5):
        stream, resumed = letters(rows, **options), letters(rows, **options)
        take(stream, stop)
        resumed.load_state_dict(stream.state_dict())
        assert [labels.tolist() for _, labels in take(resumed, 5)] == whole[stop : stop + 5]
    assert ord("h") not in sum(whole, [])


def test_more_ranks_than_before_read_no_document_of_earlier_steps_again():
    rows, read = hf_datasets.Dataset.from_dict({"text": [chr(97 + i) * 3 for i in range(24)]}), []
    options = {"keeps": lambda row: not read.append(row["text"])}
    two, four = ([letters(rows, (rank, ranks), **options) for rank in range(ranks)] for ranks in (2, 4))
    for stream in two:
        take(stream, 5)
    earlier = set(read)
    read.clear()
    for stream in four:
        stream.load_state_dict(*(other.state_dict() for other in two))
        take(stream, 1)
    assert read and len(earlier) == 10 and not earlier.intersection(read)


def test_a_stream_without_text_is_an_error():
    """It would be read again without end."""
    rows = hf_datasets.Dataset.from_dict({"text": ["", ""]}).to_iterable_dataset()
    with pytest.raises(ConfigError, match="'hf' has too little text; take more, or fewer ranks"):
        next(iter(letters(rows)))


def test_any_number_of_ranks_goes_on_with_the_samples_of_a_stream(hub, monkeypatch):
    """Three ranks read both files, more than once, without held-out documents."""
    config, begun_by = hf_job("--validation.enable", "--validation.steps=1"), 3
    tokenizer = build_tokenizer(config)
    expected, _ = on_ranks(config, tokenizer, begun_by, None, 816, monkeypatch)
    read, state, encoded, encode = [], None, [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **tokens: encoded.append(text) or encode(text, **tokens))
    for ranks, count in ((begun_by, 144), (1, 20), (3, 228), (8, 96), (2, 64), (begun_by, 264)):
        encoded.clear()
        samples, state = on_ranks(config, tokenizer, ranks, state, count, monkeypatch)
        read += samples
        assert state["samples"] == len(read)
    assert read == expected
    assert len(encoded) < 1.2 * len(set(encoded)), "no rank begins at the start of its lane"


def test_a_stream_validates_on_its_validation_split(hub):
    config = hf_job("--validation.enable", "--validation.dataset=hf", "--validation.steps=2")
    held_out = validation_loader(config, 2, 0)
    assert hub[-1] == ("en", "validation")
    first = take(held_out, 1)[0][0]["input"][0]
    expected = build_tokenizer(config).encode(text(500_000, 40), add_bos=True, add_eos=True)[:16]
    assert first.tolist() == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_every_validation_on_a_split_reads_the_same_text(hub, workers):
    flags = ("--validation.dataset=hf", "--validation.dataset_path=some/set", "--validation.steps=2")
    loader = validation_loader(hf_job("--validation.enable", *flags, f"--validation.dataloader.num_workers={workers}"))
    first, second = (rows_of(take(loader, 2)) for _ in range(2))
    assert first == second and loader.num_workers == workers


def test_no_worker_is_without_a_file(hub):
    """TorchTitan's loop over an endless stream would never end there."""
    config = hf_job("--training.dataloader.num_workers=2")
    tokenizer = build_tokenizer(config)
    assert build_dataloader(1, 0, tokenizer, config).num_workers == 2
    with pytest.raises(ConfigError, match="training.dataloader.num_workers = 2 is more than the 1 file"):
        build_dataloader(2, 0, tokenizer, config)
    other = ("--validation.enable", "--validation.dataset=hf", "--validation.dataset_path=some/set")
    with pytest.raises(ConfigError, match="validation.dataloader.num_workers = 3 is more than the 2 file"):
        validation_loader(hf_job(*other, "--validation.dataloader.num_workers=3"))


def held_out(split: bool, share: float) -> list[str]:
    texts = (text(1000 * shard + i, 40) for shard in (0, 1) for i in range(60))
    return [one for one in texts if is_held_out(one, share) == split]


def decoded(tokenizer, loader, count: int) -> str:
    """The text of the first ``count`` batches of one rank."""
    return "".join(tokenizer.decode(list(row), skip_special_tokens=True) for row in rows_of(take(loader, count)))


def test_a_stream_without_a_validation_setting_holds_documents_out_of_training(hub):
    workers = ["--validation.dataloader.num_workers=1", "--validation.dataloader.persistent_workers"]
    config = hf_job("--validation.enable", "--validation.steps=4", *workers)
    tokenizer = build_tokenizer(config)
    training, validation = held_out(False, 0.3), held_out(True, 0.3)
    assert len(training) + len(validation) == 120 and 20 < len(validation) < 60
    read = decoded(tokenizer, build_dataloader(1, 0, tokenizer, config), 40)
    assert read.startswith("".join(training[:5])) and not any(one in read for one in validation)
    own = validation_loader(config)
    first = take(own, 4)
    READ.clear()
    assert same(first, take(own, 4)) and len(rows_of(own)) == 4 * 4
    seen = decoded(tokenizer, own, 4)
    assert seen.startswith(validation[0]) and not any(one in seen for one in training)
    assert READ == [], "the stream is read once"
    again = validation_loader(hf_job("--validation.enable", "--validation.steps=300"))
    assert len(rows_of(again)) == 300 * 4, "a short stream is repeated, so that ranks agree"


def test_a_stream_with_held_out_documents_resumes_exactly_and_ranks_differ(hub):
    config = hf_job("--validation.enable", "--validation.steps=1")
    tokenizer = build_tokenizer(config)
    require_exact_resume(config, tokenizer, 17, 30)
    ranks = [rows_of(validation_loader(config, 2, rank)) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 4 and not set(ranks[0]) & set(ranks[1])


def test_a_run_on_a_stream_does_not_start_or_stop_to_hold_out_documents(hub):
    plain, follows = hf_job(), hf_job("--validation.enable", "--validation.steps=1")
    folder = build_tokenizer(plain) and prepare_from_job(plain).tokenizer
    tokenizer = [f"--model.hf_assets_path={folder}", "--data.vocab_size=0"]  # equal, so the stream alone differs
    plain, follows = hf_job(*tokenizer), hf_job("--validation.enable", "--validation.steps=1", *tokenizer)
    loaders = [build_dataloader(1, 0, build_tokenizer(config), config) for config in (plain, follows)]
    for loader in loaders:
        take(loader, 1)
    with pytest.raises(ConfigError, match="held out for validation 0.3 instead of none"):
        loaders[1].load_state_dict(loaders[0].state_dict())
    with pytest.raises(ConfigError, match=r"none instead of 0.3\); set \[validation\] and data.validation_share as"):
        loaders[0].load_state_dict(loaders[1].state_dict())


def test_a_prepared_tokenizer_is_no_way_to_hold_out_as_before():
    """It does not say what is held out. Of another dataset it is the way."""
    run = mock.Mock(_starts_anew=False, _folder=Path("run"), record={"identity": {"tokenizer": "a"}})
    kept = {"identity": {"tokenizer": "b", "held_out": 0.1}, "prepared": "hf-0", "cache": "cache"}
    ways = {"hf": "set [validation] and data.validation_share as", "files": "set training.dataset = 'hf' and data.prep"}
    for dataset, way in ways.items():
        run._job.training.dataset = dataset
        with pytest.raises(ConfigError, match=re.escape(f"0.1); {way}")) as error:
            data_loader.RunData.require_same(run, kept)
        assert str(error.value).count(", or ") == 1


def test_streams_without_following_validation_are_prepared_as_before(hub):
    plain = prepare_from_job(hf_job()).folder
    for flags in (["--validation.dataset=hf"], ["--validation.dataset=files"], ["--validation.dataset_path=other/set"]):
        assert prepare_from_job(hf_job("--validation.enable", *flags)).folder == plain
    assert prepare_from_job(hf_job("--validation.enable")).folder != plain  # its tokenizer has read other documents


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (["--validation.steps=-1"], 1, "validation.steps = -1 reads validation.dataset = 'hf' to its end"),
        (["--validation.dataset=hf"], 2, "validation.steps = -1 reads validation.dataset = 'hf' to its end"),
        (["--data.validation_share=0", "--validation.steps=1"], 1, "data.validation_share = 0 leaves no document"),
    ],
)
def test_streams_that_cannot_validate(hub, flags, ranks, message):
    with pytest.raises(ConfigError, match=message):
        validation_loader(hf_job("--validation.enable", *flags), ranks, 0)


def test_too_few_held_out_documents_of_a_stream(hub):
    config = hf_job("--validation.enable", "--validation.steps=1", "--data.validation_share=0.00001")
    with pytest.raises(ConfigError, match="data.validation_share = 1e-05 holds out less text than one sequence"):
        take(validation_loader(config), 1)


# Rows of streams


def test_a_stream_is_opened_with_the_settings(monkeypatch):
    calls = []

    def load_dataset_builder(path, name):
        calls.append((path, name))
        return SimpleNamespace(as_streaming_dataset=lambda split: [split], hash="c0ffee")

    monkeypatch.setattr(hf_datasets, "load_dataset_builder", load_dataset_builder)
    assert open_stream("allenai/c4", "en", "validation") == (["validation"], "c0ffee")
    assert open_stream("some/set") == (["train"], "c0ffee")
    assert calls == [("allenai/c4", "en"), ("some/set", None)]


def test_a_stream_of_local_files_has_another_version_when_they_change(tmp_path):
    folder, file = tmp_path / "own", tmp_path / "own" / "a.jsonl"
    folder.mkdir()
    file.write_text('{"text": "a"}\n')
    rows, version = open_stream(str(folder))
    assert list(stream_texts(rows, TextColumn("text", "a"), "a")) == ["a"]
    assert version and open_stream(str(folder))[1] == version
    file.write_text('{"text": "b"}\n')
    os.utime(file, (1, 1))
    assert open_stream(str(folder))[1] != version


def test_a_dataset_that_cannot_be_opened_is_a_config_error(monkeypatch):
    def fail(*args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(hf_datasets, "load_dataset_builder", fail)
    message = r"training.dataset_path = 'a/b' \(data.hf_config = 'en', split 'train'\) .*ConnectionError: no network"
    with pytest.raises(ConfigError, match=message):
        open_stream("a/b", "en")
    with pytest.raises(ConfigError, match="validation.dataset = 'hf' needs validation.dataset_path"):
        open_stream("", section="validation")


@pytest.fixture
def rows_on_hub(monkeypatch):
    """``hub(rows)`` makes these the rows of every dataset on the hub."""

    def fill(rows):
        stream = hf_datasets.IterableDataset.from_generator(lambda: iter(rows))
        monkeypatch.setattr(streams, "open_stream", lambda *_: (stream, None))

    return fill


def test_texts_and_a_missing_text_column(rows_on_hub):
    rows_on_hub([{"text": "a"}, {"text": None}, {"text": "b"}])
    assert list(hub_texts(DataConfig(dataset="hf", path="a/b"))) == ["a", "", "b"]
    with pytest.raises(ConfigError, match="data.text_key = 'content' is not a column of a/b, which has: text"):
        list(hub_texts(DataConfig(dataset="hf", path="a/b", text_key="content")))


def test_a_few_rows_without_text_are_empty_and_a_thousand_without_any_are_an_error():
    rows = [{"text": "a"}, {"body": "b"}, {"text": 3}] * 2 * PATIENCE_ROWS
    text_of = TextColumn("text", "a/b", PATIENCE_ROWS)
    assert list(stream_texts(rows, text_of, "a/b")) == ["a", "", ""] * 2 * PATIENCE_ROWS
    with pytest.raises(ConfigError, match="data.text_key = 'text' in a/b holds int, not text"):
        list(stream_texts(({"text": i} for i in itertools.count()), TextColumn("text", "a/b", PATIENCE_ROWS), "a/b"))


def test_a_stream_that_breaks_off_is_a_config_error():
    def rows():
        yield {"text": "a"}
        raise ConnectionError("reset\nby peer")

    with pytest.raises(
        ConfigError, match="^training.dataset = 'c4' cannot be read .*: ConnectionError: reset by peer$"
    ):
        list(stream_texts(rows(), TextColumn("text", "a/b", PATIENCE_ROWS), "training.dataset = 'c4'"))


def test_rows_without_text_are_on_the_side_of_training():
    """They count as empty there, with a warning: a wrong data.text_key must not end a stream in silence."""
    rows = [{"text": f"text {i}"} for i in range(50)] + [{"text": None}, {"body": "b"}]
    sides = [[row for row in rows if is_on_side(row, "text", 0.3, held_out)] for held_out in (False, True)]
    assert sides[1] == [row for row in rows[:50] if is_held_out(row["text"], 0.3)] and len(sides[1]) > 5
    assert sides[0] == [row for row in rows if row not in sides[1]]


def test_a_tokenizer_reads_the_stream_without_the_share_that_is_held_out_of_it(rows_on_hub):
    """``data.validation_share`` is of files."""
    texts = [f"text {i}" for i in range(50)]
    rows_on_hub([{"text": text} for text in texts])
    for share in (0.0, 0.3):
        config = DataConfig(dataset="hf", path="a/b", validation_share=0.6, stream_share=share)
        assert list(hub_texts(config)) == [text for text in texts if not is_held_out(text, share)]
