import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import mxtrain.titan  # noqa: F401  (points TorchTitan at this machine's device)
from mxtrain.data import loader as data_loader
from mxtrain.data.loader import RunLoader, TokenDataset, ignore_stop_signals
from mxtrain.data.token_files import Tokens
from mxtrain.data.tokenizer import tokenizer_hash
from mxtrain.errors import ConfigError
from mxtrain.launched import stop_signals
from mxtrain.titan import data as titan_data
from mxtrain.titan.data import build_dataloader, build_tokenizer, prepare_from_job
from tests.support import data_checks
from tests.support.hostile_pickles import NAME, Code

SEQ_LEN, BATCH = 7, 3
CHUNKS = 40


@pytest.fixture
def tokens():
    """Every token is its own position, which identifies the chunk of a sample. The last 5 tokens fill no chunk."""
    ids = np.arange(CHUNKS * (SEQ_LEN + 1) + 5, dtype="<u2")
    return Tokens(np.split(ids, [100, 203]), "<u2", "")


def dataset(tokens, **options) -> TokenDataset:
    sizes = SimpleNamespace(seq_len=SEQ_LEN, local_batch_size=options.pop("batch_size", BATCH))
    return TokenDataset(tokens, sizes, **options)


def loader(tokens, num_workers=0, **options) -> StatefulDataLoader:
    return StatefulDataLoader(dataset(tokens, **options), batch_size=BATCH, num_workers=num_workers)


def take(batches, count) -> list[list[int]]:
    """Return the chunk numbers of the next ``count`` batches."""
    return [(next(batches)[1][:, 0] // (SEQ_LEN + 1)).tolist() for _ in range(count)]


def chunks_of(loader) -> list[list[int]]:
    return [(labels[:, 0] // (SEQ_LEN + 1)).tolist() for _, labels in loader]


def test_labels_are_the_inputs_shifted_by_one_token(tokens):
    inputs, labels = next(iter(dataset(tokens)))
    assert list(inputs) == ["input"]
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert inputs["input"].shape == labels.shape == (SEQ_LEN,)
    start = inputs["input"][0].item()
    assert start % (SEQ_LEN + 1) == 0
    assert torch.equal(inputs["input"], torch.arange(start, start + SEQ_LEN))
    assert torch.equal(labels, inputs["input"] + 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_split_a_finite_text_evenly_without_overlap(tokens, workers):
    world = 3
    ranks = [chunks_of(loader(tokens, workers, rank=(r, world), infinite=False)) for r in range(world)]
    assert {len(batches) for batches in ranks} == {CHUNKS // (BATCH * world)}
    seen = [chunk for batches in ranks for batch in batches for chunk in batch]
    assert len(seen) == len(set(seen)) == 36  # of 40: the last four do not fill a global batch


def sequence(tokens, count, **options) -> list[int]:
    """Return the first samples of the sequence that all ranks share, as one rank alone reads them."""
    return [int(labels[0]) // (SEQ_LEN + 1) for _, labels in islice(dataset(tokens, batch_size=1, **options), count)]


def test_each_epoch_reads_every_chunk_once_in_a_new_order(tokens):
    three = sequence(tokens, 3 * CHUNKS)
    epochs = [three[i : i + CHUNKS] for i in range(0, len(three), CHUNKS)]
    assert all(sorted(epoch) == list(range(CHUNKS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != sorted(epochs[0])
    assert sequence(tokens, CHUNKS) == epochs[0] != sequence(tokens, CHUNKS, seed=1)
    assert epochs[1] != sequence(tokens, CHUNKS, seed=1), "no seed repeats the orders of another one, an epoch later"


def test_a_text_of_whole_chunks_is_read_to_its_end(tokens):
    whole = Tokens([tokens[: CHUNKS * (SEQ_LEN + 1)]], "<u2", "")
    assert sorted(sequence(whole, CHUNKS)) == list(range(CHUNKS))
    assert dataset(whole, batch_size=CHUNKS).chunks == CHUNKS


GLOBAL_BATCH = 12


def steps(tokens, start, count, world, batch_size=BATCH, workers=0) -> list[list[int]]:
    """Return the chunks of ``count`` optimizer steps that begin at sample ``start``, each in the order of the samples.

    A step takes as many microbatches on each of ``world`` ranks as fill the global batch.
    """
    ranks = []
    for rank in range(world):
        data = dataset(tokens, batch_size=batch_size, rank=(rank, world))
        data.start = start
        ranks.append(iter(StatefulDataLoader(data, batch_size=batch_size, num_workers=workers)))
    microbatches = GLOBAL_BATCH // (batch_size * world)
    return [
        [chunk for _ in range(microbatches) for rank in ranks for batch in take(rank, 1) for chunk in batch]
        for _ in range(count)
    ]


def test_the_order_does_not_change_with_the_number_of_ranks(tokens):
    """40 chunks and 12 samples a step: the fourth step straddles two epochs, and so do others."""
    layouts = [(4, 3), (2, 3), (1, 4), (4, 1), (1, 12)]  # ranks and local batch size, one after another
    read = []
    for world, batch_size in layouts:
        read += steps(tokens, GLOBAL_BATCH * len(read), 2, world, batch_size)
    whole = sequence(tokens, GLOBAL_BATCH * len(read))
    assert [chunk for step in read for chunk in step] == whole
    assert all(sorted(whole[i : i + CHUNKS]) == list(range(CHUNKS)) for i in range(0, 120, CHUNKS))


def test_more_than_one_epoch_of_workers_batches_is_in_order(tokens):
    """Every worker takes several epochs, and enters them in the middle of a batch."""
    read = steps(tokens, 5, 12, world=2, batch_size=3, workers=3)
    assert [chunk for step in read for chunk in step] == sequence(tokens, 5 + 12 * GLOBAL_BATCH)[5:]


def test_every_iteration_of_a_finite_loader_starts_at_the_beginning(tokens):
    finite = loader(tokens, infinite=False)
    whole = chunks_of(finite)
    assert chunks_of(finite) == whole
    assert take(iter(finite), 2) == whole[:2]  # leaves the iteration early
    assert chunks_of(finite) == whole


def test_a_finite_text_ends_with_its_first_epoch_wherever_an_iteration_starts(tokens):
    whole = sequence(tokens, CHUNKS)
    rest = dataset(tokens, infinite=False)
    rest.start = 30
    assert [int(labels[0]) // (SEQ_LEN + 1) for _, labels in rest] == whole[30:39]


def test_a_finite_text_of_whole_batches_is_read_to_its_end(tokens):
    finite = dataset(tokens, batch_size=CHUNKS // 4, infinite=False)
    assert len(list(finite)) == CHUNKS


def test_text_too_short_for_one_step_is_a_config_error(tokens):
    dataset(tokens, rank=(0, 13))
    message = (
        "training.local_batch_size = 3 and training.seq_len = 7 on 14 data-parallel rank.* need 336 tokens of "
        "training text for one step, but there are 325"
    )
    with pytest.raises(ConfigError, match=message):
        dataset(tokens, rank=(0, 14))
    with pytest.raises(ConfigError, match="validation.seq_len = 7 .* raise data.validation_share"):
        dataset(tokens, rank=(0, 14), section="validation")


def test_token_ids_above_16_bits():
    inputs, _ = next(iter(dataset(Tokens([np.full(80, 100_000, "<u4")], "<u4", ""))))
    assert inputs["input"].tolist() == [100_000] * SEQ_LEN


# Data loader workers live as long as their reader needs them, and no longer


def test_data_loader_workers_survive_a_signal_to_the_whole_group():
    """As systemd sends it. The process that reads from them stops after the step, and needs them until then."""
    loader = torch.utils.data.DataLoader(range(8), num_workers=1, worker_init_fn=ignore_stop_signals)
    batches = iter(loader)
    next(batches)
    for number in stop_signals():
        os.kill(batches._workers[0].pid, number)
    time.sleep(0.2)
    assert len(list(batches)) == 7


LEFT_EARLY = """
from dataclasses import make_dataclass
from types import SimpleNamespace
from mxtrain.data.loader import Loader

Workers, loaders = make_dataclass("Workers", ["num_workers", "persistent_workers", "prefetch_factor"]), []
for options in (Workers(1, False, None), Workers(1, True, 2), Workers(0, True, 2)):
    loader = Loader(range(1000), SimpleNamespace(local_batch_size=1, dataloader=options))
    batches = iter(loader)
    print(int(next(batches)))
    loaders.append((loader, batches))
raise SystemExit(3)
"""


def test_a_process_ends_that_did_not_read_its_loaders_to_the_end():
    done = subprocess.run([sys.executable, "-c", LEFT_EARLY], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (3, "0\n0\n0\n") and "Error" not in done.stderr


# What a run keeps about its data, and what it refuses when it resumes

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


def test_other_contents_are_refused_and_the_own_text_goes_on(corpus):
    state, expected = has_trained(corpus)
    name = kept_by(corpus)["prepared"]
    write(corpus, range(1, 61))  # as many documents, and nearly the same tokenizer
    own = f"training text .*; set data.prepared = '.*/{name}' to go on with the run's own, or"
    message = rf"^training.dataset = 'files' gives other data than the run so far \(tokenizer .*{own}"
    refuse(message, job(corpus), state)
    assert goes_on(job(corpus, f"--data.prepared={name}"), state, expected)
    assert kept_by(corpus)["prepared"] == name


def test_a_run_keeps_what_its_validations_read(corpus, tmp_path):
    own = tmp_path / "own.jsonl"
    flags = ["--validation.enable", "--validation.dataset=files", f"--validation.dataset_path={own}"]
    flags += ["--validation.seq_len=4", "--validation.local_batch_size=1", "--validation.steps=2"]

    def validated(numbers, ranks: int = 1) -> str:
        write(own, numbers)
        config = job(corpus, *flags)
        loader = loader_of(config, ranks)
        data_checks.validation_loader(config, ranks)
        if states:
            loader.load_state_dict(states[0])
        return kept_by(corpus)["validation_text"]

    states = []
    first = validated(range(100, 120))
    states.append(has_trained(corpus)[0])
    second = validated(range(200, 220))
    assert second != first == validated(range(100, 120), ranks=2)


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
    state, _ = has_trained(corpus)
    write(corpus, range(1, 61))
    refuse(r"\(tokenizer \w+ instead of \w+\).* model.hf_assets_path = '.*run/tokenizer'", job(corpus, ANEW))
    own = f"--model.hf_assets_path={tmp_path / 'run' / 'tokenizer'}"
    refuse(r"\(training text .* or set checkpoint.exclude_from_loading = ", job(corpus, own), state)
    before = kept_by(corpus)["identity"]
    loader = loader_of(job(corpus, own, ANEW))
    assert next(iter(loader)) and kept_by(corpus)["identity"] != before
    loader_of(job(corpus, own)).load_state_dict(loader.state_dict())


def test_another_dataset_is_named_with_its_text(corpus, stream):
    state, _ = has_trained(corpus)
    python = ("--training.dataset=python", "--training.dataset_path=", "--data.max_bytes=300000")
    refuse("set training.dataset = 'files' and data.prepared = '.*/files-", job(corpus, *python), state)
    own = f"--model.hf_assets_path={corpus.parent / 'run' / 'tokenizer'}"
    refuse(r"\(training text none instead of \w+, validation text none instead of", job(corpus, *stream, own), state)


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
    assert line.endswith(f"set model.hf_assets_path = {str(tokenizer)!r} to use their tokenizer")
    assert not lines_about(
        "another tokenizer", caplog, job(corpus, new, weights, f"--model.hf_assets_path={tokenizer}")
    )


def ranks_of(config, count) -> list[RunLoader]:
    """Build the loaders of ``count`` data-parallel ranks in this process."""
    titan_data._prepare.cache_clear()
    tokenizer = build_tokenizer(config)
    return [build_dataloader(count, rank, tokenizer, config) for rank in range(count)]


def take_samples(loaders, count) -> tuple[list, dict]:
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
    whole, _ = take_samples(ranks_of(job(corpus, "--training.local_batch_size=16"), 1), 64)
    read, state = [], None
    for ranks, batch_size, workers in [(4, 2, 2), (2, 2, 0), (1, 8, 3), (4, 1, 0)]:
        flags = (f"--training.local_batch_size={batch_size}", f"--training.dataloader.num_workers={workers}")
        loaders = ranks_of(job(corpus, *flags), ranks)
        for loader in loaders if state else []:
            loader.load_state_dict(state)
        samples, state = take_samples(loaders, 16)
        read += samples
        assert state["samples"] == len(read)
    assert read == whole


def test_workers_that_persist_go_on_where_a_second_iteration_starts(corpus):
    config = job(corpus, "--training.dataloader.num_workers=2", "--training.dataloader.persistent_workers")
    whole, _ = take_samples(ranks_of(config, 1), 12)
    loaders = ranks_of(config, 1)
    assert take_samples(loaders, 6)[0] + take_samples(loaders, 6)[0] == whole


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
    message = f"^{setting} = {new} gives the text another order than {old}, the value .*; set it to {old}, or"
    refuse(message, job(corpus, own, f"--{setting}={new}"), state)


def test_a_stream_keeps_its_tokenizer(corpus, stream):
    state, expected = has_trained(corpus, *stream)
    kept = kept_by(corpus)
    assert kept["identity"].keys() == {"tokenizer"} and kept["prepared"].startswith("c4_test-")
    assert goes_on(job(corpus, *stream), state, expected)
    message = "gives other data than the run so far .tokenizer .*data.prepared = '.*/c4_test-"
    refuse(message, job(corpus, *stream, "--data.vocab_size=310"), state)


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
    message = "^training.dataset = 'c4_test' is a stream.* = {} on 1 .*has {} on {}; start the same .* set check"
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
