"""What a run keeps about its data, and what it refuses when it resumes."""

import json
import os
import pickle
import shutil

import pytest
import torch

import mxtrain.titan  # noqa: F401  (points TorchTitan at this machine's device)
from mxtrain.data import loader as data_loader
from mxtrain.data import run_data
from mxtrain.data.loader import RunLoader
from mxtrain.data.tokenizer import tokenizer_hash
from mxtrain.errors import ConfigError
from mxtrain.titan import data as titan_data
from mxtrain.titan.data import build_dataloader, build_tokenizer, prepare_from_job
from tests.support import data_checks
from tests.support.hostile_pickles import NAME, Code

ANEW = "--checkpoint.exclude_from_loading=dataloader"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write(path, range(60))
    return path


@pytest.fixture
def stream(tmp_path_factory) -> tuple[str, str]:
    """Flags of a stream of 60 documents."""
    folder = tmp_path_factory.mktemp("own")  # datasets reads a split out of a path with "test" in it
    write(folder / "train.json", range(60))
    return ("--training.dataset=c4_test", f"--training.dataset_path={folder}")


def write(path, numbers) -> None:
    path.write_text(
        "".join(json.dumps({"text": f"{i} is followed by {i + 1}, and then {i * i}"}) + "\n" for i in numbers)
    )


def job(corpus, *flags):
    given = {flag.partition("=")[0] for flag in flags}
    own = {
        "--job.dump_folder": corpus.parent / "run",
        "--training.dataset": "files",
        "--training.dataset_path": corpus,
        "--training.local_batch_size": 2,
        "--data.validation_share": 0.01,
    }
    flags = [f"{name}={value}" for name, value in own.items() if name not in given] + list(flags)
    return data_checks.job(*flags, "--checkpoint.enable")


def loader_of(config, dp_world_size=1) -> RunLoader:
    """Build the loader as a new process does."""
    titan_data._prepare.cache_clear()
    return build_dataloader(dp_world_size, 0, build_tokenizer(config), config)


def has_trained(corpus, *flags) -> tuple[dict, list]:
    """Take three batches, leave a checkpoint, and return the loader's state and the next batch."""
    config = job(corpus, *flags)
    loader = loader_of(config)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    (corpus.parent / "run" / "checkpoint" / "step-3").mkdir(parents=True, exist_ok=True)
    return loader.state_dict(), next(batches)


def next_batch(loader, state):
    loader.load_state_dict(state)
    return next(iter(loader))


def goes_on(config, state, expected) -> bool:
    return data_checks.same([next_batch(loader_of(config), state)], [expected])


def refuse(match: str, config, state=None, ranks: int = 1) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        loader = loader_of(config, ranks)
        if state:
            loader.load_state_dict(state)
    assert "\n" not in str(caught.value)


def kept_by(corpus) -> dict:
    return json.loads((corpus.parent / "run" / "data.json").read_text())


def lines_about(words: str, caplog, config) -> list[str]:
    """The lines with ``words`` that are logged when a loader is built."""
    caplog.clear()
    loader_of(config)
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_a_run_keeps_hashes_settings_and_the_tokenizer(corpus):
    has_trained(corpus)
    prepared, run = prepare_from_job(job(corpus)), corpus.parent / "run"
    kept = kept_by(corpus)
    assert kept["identity"] == prepared.identity
    assert (kept["prepared"], kept["cache"]) == (prepared.folder.name, str(prepared.folder.parent))
    assert tokenizer_hash(run / "tokenizer") == prepared.identity["tokenizer"]


def test_the_same_contents_resume_after_a_purge_and_with_new_times(corpus, cache):
    state, expected = has_trained(corpus)
    shutil.rmtree(cache)
    os.utime(corpus, (1, 1))
    assert goes_on(job(corpus), state, expected)


def test_other_contents_are_refused_and_the_own_text_goes_on(corpus, cache):
    state, expected = has_trained(corpus)
    name = kept_by(corpus)["prepared"]
    write(corpus, range(1, 61))  # as many documents, and nearly the same tokenizer
    own = f"training text .*: set data.prepared = {name!r} to go on with the run's own; or"
    refuse(rf"^training.dataset = 'files' gives other data than the run so far \(tokenizer .*{own}", job(corpus))
    assert goes_on(job(corpus, f"--data.prepared={name}"), state, expected)
    assert kept_by(corpus)["prepared"] == name
    shutil.rmtree(cache)
    refuse("bring back the files of .*'files-.*, which is no longer in .*cache; or", job(corpus))


def test_a_validation_text_that_has_changed_is_a_warning(corpus, tmp_path, caplog):
    """It is not in the hashes of the training text, so nothing refuses it."""
    own = tmp_path / "own.jsonl"
    flags = ["--validation.enable", "--validation.dataset=files", f"--validation.dataset_path={own}"]
    flags += ["--validation.seq_len=16", "--validation.local_batch_size=2"]

    def validated(numbers) -> str:
        write(own, numbers)
        loader = loader_of(job(corpus, *flags))
        data_checks.validation_loader(job(corpus, *flags))
        if states:
            loader.load_state_dict(states[0])
        return kept_by(corpus)["validation_text"]

    states = []
    first = validated(range(100, 120))
    states.append(has_trained(corpus)[0])
    assert validated(range(100, 120)) == first and "validation text" not in caplog.text
    second = validated(range(200, 220))
    assert second != first
    assert f"the validation text ({second[:12]}) is another than that of the run so far ({first[:12]})" in caplog.text


def test_a_validation_of_other_length_is_a_warning(corpus, caplog, monkeypatch):
    """On two processes, validation.steps batches are twice as much of the same text."""
    flags = ["--validation.enable", "--validation.seq_len=4", "--validation.local_batch_size=1", "--validation.steps=2"]
    config = job(corpus, *flags, "--data.validation_share=0.3")

    def validated(ranks: int) -> str:
        loader_of(config, ranks)
        data_checks.validation_loader(config, ranks)
        return kept_by(corpus)["validation_sequences"]

    assert validated(1) == "2"
    (corpus.parent / "run" / "checkpoint" / "step-3").mkdir(parents=True)
    assert validated(1) == "2" and "validation" not in caplog.text
    assert validated(2) == "4"
    assert "the number of sequences per validation (4) is another than that of the run so far (2)" in caplog.text
    monkeypatch.setattr(run_data, "resumed_step", lambda *args: config.training.steps)
    assert validated(1) == "4", "no step is left, so what the validations have read stays"


def test_a_checkpoint_alone_refuses_other_contents(corpus, tmp_path):
    """Without data.json, for example because only the checkpoints were copied."""
    state, expected = has_trained(corpus)
    kept = kept_by(corpus)
    (tmp_path / "run" / "data.json").unlink()
    write(corpus, range(1, 61))
    for workers in (0, 1):
        message = (
            f"^training.dataset = 'files' gives other data than .*hf_assets_path = '{tmp_path / 'run' / 'tokenizer'}'"
        )
        refuse(message, job(corpus, f"--training.dataloader.num_workers={workers}"), state)
    assert not (tmp_path / "run" / "data.json").exists()
    assert tokenizer_hash(tmp_path / "run" / "tokenizer") == kept["identity"]["tokenizer"]
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    assert goes_on(job(corpus, f"--data.prepared={kept['prepared']}"), state, expected)
    assert kept_by(corpus)["identity"] == kept["identity"]
    assert tokenizer_hash(tmp_path / "run" / "tokenizer") == kept["identity"]["tokenizer"]


def test_the_runs_tokenizer_reads_a_new_text_from_the_beginning(corpus, tmp_path):
    has_trained(corpus)
    write(corpus, range(1, 61))
    refuse(r"\(tokenizer \w+ instead of \w+\).* model.hf_assets_path = '.*run/tokenizer'", job(corpus, ANEW))
    own = f"--model.hf_assets_path={tmp_path / 'run' / 'tokenizer'}"
    refuse(r"\(training text .* or set checkpoint.exclude_from_loading = ", job(corpus, own))
    before = (tmp_path / "run" / "data.json").read_text()
    loader = loader_of(job(corpus, own, ANEW))
    assert next(iter(loader))
    assert (tmp_path / "run" / "data.json").read_text() == before  # the checkpoints have the old text, to return to
    loader.state_dict()
    assert kept_by(corpus)["identity"] != json.loads(before)["identity"]
    loader_of(job(corpus, own))


def test_another_dataset_is_named_with_its_text(corpus, stream):
    has_trained(corpus)
    python = ("--training.dataset=python", "--training.dataset_path=", "--data.max_bytes=300000")
    refuse("set training.dataset = 'files' and data.prepared = 'files-", job(corpus, *python))
    own = f"--model.hf_assets_path={corpus.parent / 'run' / 'tokenizer'}"
    refuse(r"\(training text none instead of \w+, validation text none instead of", job(corpus, *stream, own))


def test_a_folder_without_checkpoints_takes_other_data(corpus, tmp_path):
    has_trained(corpus)
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-3")
    (tmp_path / "run" / "checkpoint" / "step-0").mkdir()  # weights only
    write(corpus, range(1, 61))
    loader_of(job(corpus))
    assert kept_by(corpus)["identity"] == prepare_from_job(job(corpus)).identity


def test_a_folder_with_a_damaged_record_that_starts_anew_gets_another_one(corpus, tmp_path):
    has_trained(corpus)
    (tmp_path / "run" / "data.json").write_text("{}")
    loader_of(job(corpus, ANEW))
    assert "identity" in kept_by(corpus)


def test_weights_of_another_tokenizer_are_warned_of(corpus, tmp_path, caplog):
    has_trained(corpus)
    write(corpus, range(1, 61))
    weights = f"--checkpoint.initial_load_path={tmp_path / 'run' / 'checkpoint' / 'step-3'}"
    new, tokenizer = f"--job.dump_folder={tmp_path / 'new'}", tmp_path / "run" / "tokenizer"
    (line,) = lines_about("another tokenizer", caplog, job(corpus, new, weights))
    assert line.endswith(f"set model.hf_assets_path = {str(tokenizer)!r} to use it")
    assert not lines_about(
        "another tokenizer", caplog, job(corpus, new, weights, f"--model.hf_assets_path={tokenizer}")
    )


def ranks_of(config, count) -> list[RunLoader]:
    """Build the loaders of ``count`` data-parallel ranks in this process."""
    titan_data._prepare.cache_clear()
    tokenizer = build_tokenizer(config)
    return [build_dataloader(count, rank, tokenizer, config) for rank in range(count)]


def take(loaders, count) -> tuple[list, dict]:
    """Return the next ``count`` samples of all ranks together, and the state that every rank then has."""
    iterators, samples = [iter(loader) for loader in loaders], []
    while len(samples) < count:
        for iterator in iterators:
            samples += [tuple(labels.tolist()) for labels in next(iterator)[1]]
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return samples, states[0]


def test_any_number_of_ranks_workers_and_samples_per_batch_reads_on(corpus):
    """4 ranks, then 2, 1 and 4. Workers prepare batches in advance, which must not count."""
    whole, _ = take(ranks_of(job(corpus, "--training.local_batch_size=16"), 1), 64)
    read, state = [], None
    for ranks, batch_size, workers in [(4, 2, 2), (2, 2, 0), (1, 8, 3), (4, 1, 0)]:
        flags = (f"--training.local_batch_size={batch_size}", f"--training.dataloader.num_workers={workers}")
        loaders = ranks_of(job(corpus, *flags), ranks)
        for loader in loaders if state else []:
            loader.load_state_dict(state)
        samples, state = take(loaders, 16)
        read += samples
        assert state["samples"] == len(read)
    assert read == whole


def test_workers_that_persist_go_on_where_a_second_iteration_starts(corpus):
    config = job(corpus, "--training.dataloader.num_workers=2", "--training.dataloader.persistent_workers")
    whole, _ = take(ranks_of(config, 1), 12)
    loaders = ranks_of(config, 1)
    assert take(loaders, 6)[0] + take(loaders, 6)[0] == whole


def test_an_iteration_takes_nothing_from_the_default_generator(corpus):
    """A resumed run has one iteration more than an uninterrupted one, and restores the generator before."""
    loader = loader_of(job(corpus))
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("setting, old, new", [("training.seq_len", 16, 17), ("data.seed", 0, 1)])
def test_a_position_in_another_order_is_refused(corpus, setting, old, new):
    state, _ = has_trained(corpus)
    data = json.loads(state["data"])
    own = f"--data.prepared={data['prepared']}"  # another seed would prepare another text
    message = f"^{setting} = {new}, but was {old} in the run so far.*: set it to {old}, or"
    refuse(message, job(corpus, own, f"--{setting}={new}"), state)


def test_a_stream_keeps_its_tokenizer(corpus, stream):
    state, expected = has_trained(corpus, *stream)
    kept = kept_by(corpus)
    assert kept["identity"].keys() == {"tokenizer"} and kept["prepared"].startswith("c4_test-")
    assert goes_on(job(corpus, *stream), state, expected)
    message = "gives other data than the run so far .tokenizer .*data.prepared = 'c4_test-"
    refuse(message, job(corpus, *stream, "--data.vocab_size=310"))


def test_every_rank_of_a_stream_has_its_own_state(corpus, stream, monkeypatch):
    config = job(corpus, *stream)
    loaders, own = ranks_of(config, 2), []
    for loader in loaders:
        next(iter(loader))
        monkeypatch.setattr(data_loader, "gather", lambda value: own.append(value) or [value])
        loader.state_dict()
    # Both ranks twice and in another order, as under tensor parallelism.
    monkeypatch.setattr(data_loader, "gather", lambda value: [*reversed(own), *own])
    state, expected = loaders[0].state_dict(), [next(iter(loader)) for loader in loaders]
    assert loaders[1].state_dict()["streams"] == state["streams"]
    for new, (batch, _) in zip(ranks_of(config, 2), expected):
        assert torch.equal(next_batch(new, state)[0]["input"], batch["input"])
    assert not torch.equal(expected[0][0]["input"], expected[1][0]["input"])


def test_a_stream_that_workers_read_resumes_with_as_many_ranks_and_workers_only(corpus, stream, tmp_path):
    state, _ = has_trained(corpus, *stream)
    message = "^training.dataset = 'c4_test' is a stream.* = {} on 1 .*has {} on {}; start as many .* set check"
    worker = "--training.dataloader.num_workers=1"
    refuse(message.format(0, 1, 1), job(corpus, *stream, worker), state)
    refuse(message.format(1, 1, 2), job(corpus, *stream, worker), has_trained(corpus, *stream, worker)[0], ranks=2)
    mark = tmp_path / "mark"
    for code in (pickle.dumps(Code(mark)), pickle.dumps([pickle.dumps(Code(mark))])):
        message = f"cannot be loaded: it names {NAME}, and could run code"
        refuse(message, job(corpus, *stream), {**state, "streams": code})
    assert not mark.exists()


def test_a_run_folder_that_cannot_be_written_is_one_line(corpus, tmp_path):
    (tmp_path / "run").write_text("a file")
    refuse("^job.dump_folder = '.*run' cannot be written: ", job(corpus))
