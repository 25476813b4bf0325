import os
import subprocess
import sys
import time
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from mxtrain.data.loader import TokenDataset, ignore_stop_signals
from mxtrain.data.token_files import Tokens
from mxtrain.errors import ConfigError
from mxtrain.launched import stop_signals

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
    finite = dataset(tokens, rank=(0, world), infinite=False)
    assert [finite.samples(batches) for batches in (-1, 1, 1000)] == [36, world * BATCH, 36]


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


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_does_not_change_with_the_number_of_ranks(tokens, workers):
    """40 chunks and 12 samples a step: the fourth step straddles two epochs, and so do others."""
    layouts = [(4, 3), (2, 3), (1, 4), (4, 1), (1, 12)]  # ranks and local batch size, one after another
    read = []
    for world, batch_size in layouts:
        read += steps(tokens, GLOBAL_BATCH * len(read), 2, world, batch_size, workers)
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
    done = subprocess.run([sys.executable, "-c", LEFT_EARLY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "0\n0\n0\n") and "Error" not in done.stderr
