"""What a run keeps about its data, and what it refuses when it resumes."""

import json
import os
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import ConfigManager

import mxtrain.titan  # noqa: F401  (points TorchTitan at this machine's device)
from mxtrain.data.tokenizer import tokenizer_hash
from mxtrain.errors import ConfigError
from mxtrain.titan.data import run_data
from mxtrain.titan.data.datasets import (
    _prepare,
    build_dataloader,
    build_tokenizer,
    build_validator,
    prepare_from_job,
)
from mxtrain.titan.data.run_data import RunLoader
from tests.support.hostile_pickles import NAME, Code


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write(path, range(60))
    return path


def write(path, numbers) -> None:
    path.write_text(
        "".join(json.dumps({"text": f"{i} is followed by {i + 1}, and then {i * i}"}) + "\n" for i in numbers)
    )


def job(corpus, *flags):
    defaults = {
        "job.custom_config_module": "mxtrain.titan.job_config",
        "job.dump_folder": corpus.parent / "run",
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "data.vocab_size": 300,
        "training.dataset": "files",
        "training.dataset_path": corpus,
        "training.seq_len": 16,
        "training.local_batch_size": 2,
    }
    given = {flag.partition("=")[0].removeprefix("--") for flag in flags}
    flags = [f"--{name}={value}" for name, value in defaults.items() if name not in given] + list(flags)
    return ConfigManager().parse_args([*flags, "--checkpoint.enable"])


def loader_of(config, dp_world_size=1) -> ParallelAwareDataloader:
    """Build the loader as a new process does."""
    _prepare.cache_clear()
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


def same(one, two) -> bool:
    return torch.equal(one[0]["input"], two[0]["input"]) and torch.equal(one[1], two[1])


def test_a_run_keeps_hashes_settings_and_the_tokenizer(corpus):
    has_trained(corpus)
    prepared, run = prepare_from_job(job(corpus)), corpus.parent / "run"
    kept = json.loads((run / "data.json").read_text())
    assert kept["identity"] == prepared.identity
    assert (kept["prepared"], kept["cache"]) == (prepared.folder.name, str(prepared.folder.parent))
    assert kept["settings"]["data.vocab_size"] == 300 and kept["settings"]["training.dataset_path"] == str(corpus)
    assert tokenizer_hash(run / "tokenizer") == prepared.identity["tokenizer"]


def test_only_the_tokenizers_own_files_are_copied(corpus, tmp_path):
    own = tmp_path / "assets"
    shutil.copytree(prepare_from_job(job(corpus)).tokenizer, own)
    (own / "model.safetensors").write_bytes(b"many gigabytes")
    loader_of(job(corpus, f"--model.hf_assets_path={own}"))
    assert {path.name for path in (tmp_path / "run" / "tokenizer").iterdir()} == {p.name for p in own.iterdir()} - {
        "model.safetensors"
    }
    assert next(iter(loader_of(job(corpus, f"--model.hf_assets_path={tmp_path / 'run' / 'tokenizer'}"))))


def test_the_same_contents_resume_after_a_purge_and_with_new_times(corpus, cache):
    state, expected = has_trained(corpus)
    shutil.rmtree(cache)
    os.utime(corpus, (1, 1))
    assert same(next_batch(loader_of(job(corpus)), state), expected)


def test_other_contents_are_refused_and_the_own_text_goes_on(corpus):
    state, expected = has_trained(corpus)
    name = json.loads((corpus.parent / "run" / "data.json").read_text())["prepared"]
    write(corpus, range(1, 61))  # as many documents, and nearly the same tokenizer
    with pytest.raises(ConfigError) as caught:
        loader_of(job(corpus))
    message = str(caught.value)
    assert message.startswith("training.dataset = 'files' gives other data than the run so far (tokenizer ")
    assert "training text " in message and "\n" not in message
    assert f"set data.prepared = {name!r} to go on with the run's own; or" in message
    own = loader_of(job(corpus, f"--data.prepared={name}"))
    assert same(next_batch(own, state), expected)
    assert json.loads((corpus.parent / "run" / "data.json").read_text())["prepared"] == name


def test_a_validation_text_that_has_changed_is_a_warning(corpus, tmp_path, caplog):
    """It is not in the hashes of the training text, so nothing refuses it."""
    own, run = tmp_path / "own.jsonl", corpus.parent / "run"
    flags = ["--validation.enable", "--validation.dataset=files", f"--validation.dataset_path={own}"]
    flags += ["--validation.seq_len=16", "--validation.local_batch_size=2"]

    def validated(numbers) -> str:
        write(own, numbers)
        loader = loader_of(job(corpus, *flags))
        parts = {"loss_fn": None, "parallel_dims": SimpleNamespace(cp=1)}
        build_validator(job(corpus, *flags), 1, 0, build_tokenizer(job(corpus)), **parts)
        if states:
            loader.load_state_dict(states[0])
        return json.loads((run / "data.json").read_text())["validation_text"]

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
        parts = {"loss_fn": None, "parallel_dims": SimpleNamespace(cp=1)}
        build_validator(config, ranks, 0, build_tokenizer(config), **parts)
        return json.loads((corpus.parent / "run" / "data.json").read_text())["validation_sequences"]

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
    kept = json.loads((tmp_path / "run" / "data.json").read_text())
    (tmp_path / "run" / "data.json").unlink()
    write(corpus, range(1, 61))
    for workers in (0, 1):
        loader = loader_of(job(corpus, f"--training.dataloader.num_workers={workers}"))
        with pytest.raises(ConfigError) as caught:
            loader.load_state_dict(state)
        message = str(caught.value)
        assert (
            message.startswith("training.dataset = 'files' gives other data than the run so far")
            and "\n" not in message
        )
        assert f"model.hf_assets_path = '{tmp_path / 'run' / 'tokenizer'}'" in message
    assert not (tmp_path / "run" / "data.json").exists()
    assert tokenizer_hash(tmp_path / "run" / "tokenizer") == kept["identity"]["tokenizer"]
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    with pytest.raises(ConfigError, match="set model.hf_assets_path to the run's own tokenizer and"):
        loader.load_state_dict(state)
    own = loader_of(job(corpus, f"--data.prepared={kept['prepared']}"))
    assert same(next_batch(own, state), expected)
    assert json.loads((tmp_path / "run" / "data.json").read_text())["identity"] == kept["identity"]
    assert tokenizer_hash(tmp_path / "run" / "tokenizer") == kept["identity"]["tokenizer"]


def test_a_purged_text_whose_source_changed_says_so(corpus, cache):
    has_trained(corpus)
    shutil.rmtree(cache)
    write(corpus, range(1, 61))
    with pytest.raises(
        ConfigError, match="bring back the files of .*'files-.*, which is no longer in .*cache either; or"
    ):
        loader_of(job(corpus))


def test_the_runs_tokenizer_reads_a_new_text_from_the_beginning(corpus, tmp_path):
    has_trained(corpus)
    write(corpus, range(1, 61))
    anew = "--checkpoint.exclude_from_loading=dataloader"
    with pytest.raises(
        ConfigError, match=r"\(tokenizer \w+ instead of \w+\).* model.hf_assets_path = '.*run/tokenizer'"
    ):
        loader_of(job(corpus, anew))
    own = f"--model.hf_assets_path={tmp_path / 'run' / 'tokenizer'}"
    with pytest.raises(ConfigError, match=r"\(training text .* or set checkpoint.exclude_from_loading = "):
        loader_of(job(corpus, own))
    before = (tmp_path / "run" / "data.json").read_text()
    loader = loader_of(job(corpus, own, anew))
    assert next(iter(loader))
    assert (tmp_path / "run" / "data.json").read_text() == before  # the checkpoints have the old text, to return to
    loader.state_dict()
    assert json.loads((tmp_path / "run" / "data.json").read_text())["identity"] != json.loads(before)["identity"]
    loader_of(job(corpus, own))


def test_another_dataset_is_named_with_its_text(corpus, tmp_path_factory):
    has_trained(corpus)
    python = ("--training.dataset=python", "--training.dataset_path=", "--data.max_bytes=300000")
    with pytest.raises(ConfigError, match="set training.dataset = 'files' and data.prepared = 'files-"):
        loader_of(job(corpus, *python))
    own = f"--model.hf_assets_path={corpus.parent / 'run' / 'tokenizer'}"
    folder = tmp_path_factory.mktemp("own")
    write(folder / "train.json", range(60))
    with pytest.raises(ConfigError, match=r"\(training text none instead of \w+, validation text none instead of"):
        loader_of(job(corpus, "--training.dataset=c4_test", f"--training.dataset_path={folder}", own))


def test_a_folder_without_checkpoints_takes_other_data(corpus, tmp_path):
    has_trained(corpus)
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-3")
    (tmp_path / "run" / "checkpoint" / "step-0").mkdir()  # weights only
    write(corpus, range(1, 61))
    loader_of(job(corpus))
    kept = json.loads((tmp_path / "run" / "data.json").read_text())
    assert kept["identity"] == prepare_from_job(job(corpus)).identity


def test_a_folder_with_a_damaged_record_that_starts_anew_is_warned_of(corpus, tmp_path, caplog):
    has_trained(corpus)
    (tmp_path / "run" / "data.json").write_text("{}")
    caplog.clear()
    loader_of(job(corpus, "--checkpoint.exclude_from_loading=dataloader"))
    (line,) = [record.getMessage() for record in caplog.records if "data.json" in record.getMessage()]
    assert line.startswith(f"{tmp_path / 'run'} has checkpoints and no data.json: whether ")
    assert "identity" in json.loads((tmp_path / "run" / "data.json").read_text())


def test_weights_of_another_tokenizer_are_warned_of(corpus, tmp_path, caplog):
    has_trained(corpus)
    write(corpus, range(1, 61))
    weights = f"--checkpoint.initial_load_path={tmp_path / 'run' / 'checkpoint' / 'step-3'}"
    new, tokenizer = f"--job.dump_folder={tmp_path / 'new'}", tmp_path / "run" / "tokenizer"
    own = f"--model.hf_assets_path={tokenizer}"
    for flags, count in (([], 1), ([own], 0)):
        caplog.clear()
        loader_of(job(corpus, new, weights, *flags))
        lines = [record.getMessage() for record in caplog.records if "another tokenizer" in record.getMessage()]
        assert len(lines) == count
        assert all(line.endswith(f"set model.hf_assets_path = {str(tokenizer)!r} to use it") for line in lines)


def ranks_of(config, count) -> list[ParallelAwareDataloader]:
    """Build the loaders of ``count`` data-parallel ranks in this process."""
    _prepare.cache_clear()
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
    with pytest.raises(
        ConfigError, match=f"^{setting} = {new}, but was {old} in the run so far.*: set it to {old}, or"
    ):
        loader_of(job(corpus, own, f"--{setting}={new}")).load_state_dict(state)


def test_a_stream_keeps_its_tokenizer(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")  # datasets reads a split out of a path with "test" in it
    write(folder / "train.json", range(60))
    stream = ("--training.dataset=c4_test", f"--training.dataset_path={folder}")
    state, expected = has_trained(corpus, *stream)
    kept = json.loads((corpus.parent / "run" / "data.json").read_text())
    assert kept["identity"].keys() == {"tokenizer"} and kept["prepared"].startswith("c4_test-")
    loader = loader_of(job(corpus, *stream))
    assert type(loader) is RunLoader and same(next_batch(loader, state), expected)
    with pytest.raises(
        ConfigError, match="gives other data than the run so far .tokenizer .*data.prepared = 'c4_test-"
    ):
        loader_of(job(corpus, *stream, "--data.vocab_size=310"))


def test_every_rank_of_a_stream_has_its_own_state(corpus, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("own")
    write(folder / "train.json", range(60))
    config = job(corpus, "--training.dataset=c4_test", f"--training.dataset_path={folder}")
    loaders, own = ranks_of(config, 2), []
    for loader in loaders:
        next(iter(loader))
        monkeypatch.setattr(run_data, "gather", lambda value: own.append(value) or [value])
        loader.state_dict()
    # Both ranks twice and in another order, as under tensor parallelism.
    monkeypatch.setattr(run_data, "gather", lambda value: [*reversed(own), *own])
    state, expected = loaders[0].state_dict(), [next(iter(loader)) for loader in loaders]
    assert loaders[1].state_dict()["streams"] == state["streams"]
    for new, (batch, _) in zip(ranks_of(config, 2), expected):
        assert torch.equal(next_batch(new, state)[0]["input"], batch["input"])
    assert not torch.equal(expected[0][0]["input"], expected[1][0]["input"])


def test_a_stream_resumes_with_as_many_ranks_and_workers_only(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    write(folder / "train.json", range(60))
    stream = ("--training.dataset=c4_test", f"--training.dataset_path={folder}")
    state, _ = has_trained(corpus, *stream)
    with pytest.raises(ConfigError, match="^training.dataset = 'c4_test' is a stream.*has 1 rank.* this run 2; start"):
        loader_of(job(corpus, *stream), dp_world_size=2).load_state_dict(state)
    workers = "^training.dataloader.num_workers = 1, but was 0 in the run so far.*: set it to 0, or set checkpoint.excl"
    with pytest.raises(ConfigError, match=workers):
        loader_of(job(corpus, *stream, "--training.dataloader.num_workers=1")).load_state_dict(state)
    mark = folder / "mark"
    for code in (pickle.dumps(Code(mark)), pickle.dumps([pickle.dumps(Code(mark))])):
        with pytest.raises(ConfigError, match=f"cannot be loaded: it names {NAME}, and could run code"):
            loader_of(job(corpus, *stream)).load_state_dict({**state, "streams": code})
    assert not mark.exists()


def test_another_stream_with_the_same_tokenizer_is_warned_of(corpus, tmp_path_factory, caplog):
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    for folder in (one, two):
        write(folder / "train.json", range(60))
    own = f"--model.hf_assets_path={prepare_from_job(job(corpus)).tokenizer}"
    stream = ("--training.dataset=c4_test", own)
    has_trained(corpus, *stream, f"--training.dataset_path={one}")
    anew = "--checkpoint.exclude_from_loading=dataloader"
    for folder, flags, count in ((one, (), 0), (two, (), 1), (one, (anew,), 0)):
        caplog.clear()
        loader_of(job(corpus, *stream, f"--training.dataset_path={folder}", *flags))
        lines = [record.getMessage() for record in caplog.records if "in the run so far" in record.getMessage()]
        assert len(lines) == count
        assert all(line.startswith(f"training.dataset_path = {str(two)!r}, but was {str(one)!r}") for line in lines)


def test_what_is_left_out_is_said_at_every_start(corpus, caplog):
    caplog.set_level("INFO")
    with corpus.open("a") as file:
        file.write('{"text": null}\n{"body": "x"}\n')
    for _ in range(2):
        caplog.clear()
        loader_of(job(corpus))
        lines = [record.getMessage() for record in caplog.records if "without text" in record.getMessage()]
        assert len(lines) == 1 and lines[0].startswith("text: ") and lines[0].endswith("; left out: 2 without text")


def test_a_run_folder_that_cannot_be_written_is_one_line(corpus, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match="^job.dump_folder = '.*run' cannot be written: "):
        loader_of(job(corpus))


@pytest.mark.parametrize(
    "value, problem", [("many", "not a whole number"), (True, "not a whole number"), (-1, "negative")]
)
def test_a_wrong_vocabulary_size_in_a_file_is_one_line(corpus, value, problem):
    config = job(corpus)
    config.data.vocab_size = value
    with pytest.raises(ConfigError, match=f"^data.vocab_size = {value!r} is {problem}"):
        build_tokenizer(config)
