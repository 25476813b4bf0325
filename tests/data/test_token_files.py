"""Text that is tokenized already: Megatron's files, flat files, and columns of token ids."""

import os
import random
import struct
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

import mxtrain.titan  # noqa: F401  (points TorchTitan at this machine's device)
from mxtrain.data import DataConfig, prepare, token_files
from mxtrain.data.token_files import Tokens
from mxtrain.data.tokenizer import train_tokenizer
from mxtrain.errors import ConfigError
from mxtrain.titan.data import build_dataloader, build_tokenizer
from tests.support.data_checks import files_job, rows_of, take, validation_loader

VOCABULARY = 300
RANDOM = random.Random(0)
DOCUMENTS = [RANDOM.choices(range(VOCABULARY), k=20 + i % 9) for i in range(100)]
IDS = sum(DOCUMENTS, [])
SHARE = 0.1
CODES = {"<i4": 4, "<i8": 5, "<u2": 8}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, prose) -> Path:
    folder = tmp_path_factory.mktemp("tokenized") / "tokenizer"
    train_tokenizer([prose(0)], VOCABULARY, folder, lambda line: None)
    return folder


@pytest.fixture
def texts(tmp_path) -> Path:
    (tmp_path / "texts").mkdir()
    return tmp_path / "texts"


def flat(folder, dtype, ids=IDS) -> Path:
    np.array(ids, dtype).tofile(folder / "text.bin")
    return folder / "text.bin"


def megatron(folder, dtype, sequences=DOCUMENTS, code=None, ends=None) -> Path:
    """Write the two files as Megatron-LM's IndexedDatasetBuilder does. ``ends``: of documents, which begin at 0."""
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    places = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
    marks = np.array(ends or range(len(sequences) + 1), "<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code or CODES[dtype], len(sequences), len(marks))
    (folder / "text.idx").write_bytes(header + lengths.tobytes() + places.tobytes() + marks.tobytes())
    return flat(folder, dtype, sum(sequences, []))


def config(path, tokenizer, **fields) -> DataConfig:
    own = {"tokenizer_path": str(tokenizer), "vocab_size": 0, "validation_share": SHARE}
    return DataConfig("files", str(path), **own | fields)


def prepared_from(path, tokenizer, **fields):
    return prepare(config(path, tokenizer, **fields), lambda line: None)


def test_tokens_in_pieces_are_sliced_as_one_array():
    whole = np.arange(100, dtype="<u2")
    tokens = Tokens(np.split(whole, [3, 3, 40, 99]), "<u2", "")
    assert len(tokens) == 100 and tokens[:].dtype == "<u2"
    for start, stop in ((0, 100), (0, 3), (3, 4), (2, 41), (39, 99), (99, 500), (50, 50), (100, 101)):
        assert np.array_equal(tokens[start:stop], whole[start:stop])
    assert len(Tokens([], "<u2", "")) == len(Tokens([], "<u2", "")[:]) == 0


@pytest.mark.parametrize("write", [flat, megatron])
@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_files_of_ids_stay_where_they_lie(texts, tokenizer, write, dtype, monkeypatch):
    path, whole = write(texts, dtype), []
    monkeypatch.setattr(token_files, "PIECE", 300)
    for part_bytes in (1 << 28, 1000):
        monkeypatch.setattr(token_files, "PART_BYTES", part_bytes)
        monkeypatch.setenv("MXTRAIN_CACHE", str(texts.parent / f"cache{part_bytes}"))
        prepared = prepared_from(path, tokenizer)
        assert [*prepared.train[:], *prepared.validation[:]] == IDS
        whole.append(prepared.identity)
    assert whole[0]["train"] == sha256(prepared.train[:]).hexdigest() != whole[1]["train"]
    assert prepared.identity == prepared_from(texts, tokenizer).identity
    if write is megatron:
        assert list(prepared.validation[:]) == sum(DOCUMENTS[-len(DOCUMENTS) // 10 :], [])
    else:
        assert len(prepared.validation) == int(len(IDS) * SHARE)
    assert {file.resolve() for file in prepared.folder.iterdir()} == {path, prepared.folder / "prepared.json"}
    said = "100 documents, " if write is megatron else f"{len(IDS):,} tokens, "
    assert prepared.report.line.startswith(said) and prepared.report.bytes == path.stat().st_size
    again = prepared_from(path, tokenizer, validation_share=0.0)
    assert again.train[:].tolist() == IDS and len(again.validation) == 0
    os.utime(texts / ("text.idx" if write is megatron else "text.bin"), (0, 0))
    assert prepared_from(path, tokenizer).folder != prepared.folder


@pytest.mark.parametrize(
    "ends, documents, held_out, begin",
    [
        ([*range(0, 101, 5)], 20, 2, 90),
        ([0, 0, 50, 88, 88, 93, 100], 4, 1, 93),  # two documents are empty
        ([*range(0, 96, 5)], 20, 2, 90),  # the last one was not ended
        ([0, 50, 100], 2, 0, 100),  # the last one is longer than the share
    ],
)
def test_megatrons_documents_of_several_sequences_stay_whole(texts, tokenizer, ends, documents, held_out, begin):
    prepared = prepared_from(megatron(texts, "<u2", ends=ends), tokenizer)
    assert (prepared.report.documents, prepared.report.validation_documents) == (documents, held_out)
    assert prepared.train[:].tolist() == sum(DOCUMENTS[:begin], [])
    assert prepared.validation[:].tolist() == sum(DOCUMENTS[begin:], [])


def test_a_document_that_begins_where_the_share_does_is_held_out(texts, tokenizer):
    tenths = [IDS[i : i + 10] for i in range(0, 100, 10)]
    prepared = prepared_from(megatron(texts, "<u2", tenths), tokenizer)
    assert prepared.train[:].tolist() == IDS[:90] and prepared.validation[:].tolist() == tenths[-1]


@pytest.mark.parametrize("path", ["text.bin", "text", ""])
def test_megatrons_prefix_also_beside_a_folder_of_that_name(texts, tokenizer, path):
    megatron(texts, "<u2")
    expected = prepared_from(texts / "text.idx", tokenizer)
    (texts / "text").mkdir()  # in which Megatron keeps the order of its samples
    prepared = prepared_from(texts / path, tokenizer)
    assert prepared.identity == expected.identity and prepared.report == replace(
        expected.report, folder=str(prepared.folder)
    )


@pytest.mark.parametrize("write", [flat, megatron])
def test_an_empty_file_among_others(texts, tokenizer, write):
    expected = prepared_from(write(texts, "<i4"), tokenizer)
    for name in ("a", "b"):
        (texts / f"{name}.bin").write_bytes(b"")
    nothing = texts / "nothing"
    nothing.mkdir()
    megatron(nothing, "<i4", [])
    prepared = prepared_from(texts, tokenizer)
    assert prepared.identity == expected.identity and prepared.report.dropped == {"empty": 3}


@pytest.mark.parametrize("kind", ["saved", "parquet", "large lists"])
def test_columns_of_ids_are_split_as_text_is(texts, tokenizer, kind):
    """A hash of the ids decides what is held out. Bytes of other types are the same text."""
    path = texts / "rows"
    path.mkdir()
    rows = [*DOCUMENTS, [], DOCUMENTS[0]]
    if kind == "saved":
        dataset = Dataset.from_dict({"input_ids": rows, "attention_mask": rows})
        dataset.save_to_disk(path)
        Dataset.load_from_disk(path).map(lambda row: {"input_ids": [0]})  # leaves a file in the folder
        assert list(path.glob("cache-*.arrow"))
    else:
        ids = pa.array([*rows, None], pa.large_list(pa.int64()) if kind == "large lists" else pa.list_(pa.uint16()))
        pq.write_table(pa.table({"input_ids": ids}), path / "a.parquet")
    prepared = prepared_from(path, tokenizer, text_key="input_ids")
    assert prepared.train.dtype == "<u2" and prepared.report.validation_documents in range(3, 20)
    assert prepared.report.dropped["empty"] == (1 if kind == "saved" else 2) and prepared.report.documents == 101
    assert "tokenized already" in prepared.report.line
    other = texts / "other"
    other.mkdir()
    pq.write_table(pa.table({"input_ids": rows}), other / "b.parquet")
    assert prepared_from(other, tokenizer, text_key="input_ids").identity == prepared.identity
    sides = [split[:].tolist() for split in (prepared.train, prepared.validation)]
    for document in DOCUMENTS:
        found = [any(side[i : i + len(document)] == document for i in range(len(side))) for side in sides]
        assert sum(found) == 1
    assert len(sides[0]) + len(sides[1]) == len(IDS) + len(DOCUMENTS[0])


def test_packed_ids_of_one_length(texts, tokenizer):
    rows = [*np.reshape(IDS[: 8 * (len(IDS) // 8)], (-1, 8)).tolist(), None]
    for kind in (pa.list_(pa.int32(), 8), pa.list_(pa.int32())):
        folder = texts / str(kind)
        folder.mkdir()
        pq.write_table(pa.table({"input_ids": pa.array(rows, kind)}), folder / "a.parquet")
    packed, others = (prepared_from(folder, tokenizer, text_key="input_ids") for folder in texts.iterdir())
    assert packed.identity == others.identity and packed.report.documents == len(rows) - 1


def test_a_run_trains_and_validates_on_ids(texts, tokenizer):
    flat(texts, "<u2")
    job = files_job(texts, f"--model.hf_assets_path={tokenizer}", "--validation.enable", "--validation.steps=-1")
    batches = take(build_dataloader(1, 0, build_tokenizer(job), job), 1)
    held_out = IDS[-int(0.3 * len(IDS)) :]
    for rows, ids in ((rows_of(batches), IDS[: -len(held_out)]), (rows_of(validation_loader(job)), held_out)):
        assert rows and set(rows) <= {tuple(ids[i : i + 17]) for i in range(0, len(ids), 17)}


def test_a_prepared_text_whose_files_are_gone_or_shorter_is_one_line(texts, tokenizer):
    path = flat(texts, "<u2")
    name = prepared_from(path, tokenizer).folder.name
    for change, message in (
        (lambda: path.write_bytes(path.read_bytes()[:100]), "greater than"),
        (path.unlink, "No such"),
    ):
        change()
        with pytest.raises(ConfigError, match=f"^the prepared text .* cannot be read .*{message}.*remove the folder"):
            prepare(DataConfig("files", prepared=name), lambda line: None)


def test_max_bytes_and_many_files(texts, tokenizer):
    for name in ("a", "b", "c"):
        flat(texts, "<u2").rename(texts / f"{name}.bin")
    whole = prepared_from(texts, tokenizer)
    assert len(whole.train) + len(whole.validation) == 3 * len(IDS) and whole.report.files == 3
    assert whole.validation[:].tolist() == 3 * IDS[-int(SHARE * len(IDS)) :]
    part = prepared_from(texts, tokenizer, max_bytes=2 * len(IDS) + 200, validation_share=0.0)
    assert part.train[:].tolist() == IDS + IDS[:100]
    part = prepared_from(megatron(texts, "<u2", [[1, 2, 3]] * 40), tokenizer, max_bytes=60)
    assert (len(part.train) + len(part.validation), part.report.documents) == (30, 10)


@pytest.mark.parametrize("dtype", ["<u4", "<i4", "<i8"])
def test_ids_of_more_bytes_than_they_need(texts, tokenizer, dtype):
    """NumPy writes 8 bytes unless it is told otherwise."""
    prepared = prepared_from(flat(texts, dtype), tokenizer)
    assert [*prepared.train[:], *prepared.validation[:]] == IDS


def test_ids_above_16_bits(texts):
    """With so many tokens a flat file has 32 bits, or 64."""
    np.array([70_000, 5], "<i8").tofile(texts / "wide.bin")
    assert token_files._layout(texts / "wide.bin", 70_001)[0] == "<i8"
    np.array([70_000, 5], "<u4").tofile(texts / "wide.bin")
    assert token_files._layout(texts / "wide.bin", 70_001)[0] == "<u4"
    assert token_files._layout(texts / "wide.bin", 65_536)[0] == "<u2"


def index(change):
    """Write Megatron's files, and change the bytes of the index."""

    def write(folder):
        path = megatron(folder, "<u2")
        file = folder / "text.idx"
        file.write_bytes(change(file.read_bytes()))
        return path

    return write


def swapped(content):
    """Change the index so that its first two sequences begin in the place of each other."""
    begin = 34 + 4 * len(DOCUMENTS)
    return content[:begin] + content[begin + 8 : begin + 16] + content[begin : begin + 8] + content[begin + 16 :]


def cut(write, size: int):
    def write_and_cut(folder):
        path = write(folder, "<u2")
        path.write_bytes(path.read_bytes()[:size])
        return path

    return write_and_cut


def without_bin(folder):
    megatron(folder, "<u2").unlink()
    return folder / "*.idx"


def rows(ids, key="input_ids"):
    def write(folder):
        pq.write_table(pa.table({key: ids}), folder / "a.parquet")
        return folder / "a.parquet"

    return write


def two_types(folder):
    flat(folder, "<u2").rename(folder / "a.bin")
    flat(folder, "<u4")
    return folder


BAD = [
    (lambda folder: flat(folder, "<u2", [1, 300]), "text.bin as token ids: the id 300, read as uint16, is not among"),
    (lambda folder: megatron(folder, "<i4", [[1], [-1]]), "text.bin as token ids: the id -1, read as int32"),
    (rows([[1, None]]), "a.parquet as parquet: a list of ids has a null"),
    (rows(DOCUMENTS, "tokens"), "data.text_key = 'input_ids' is not a column of"),
    (rows([[0.5]]), "data.text_key = 'input_ids' in {folder}/a.parquet holds list, not text"),
    (without_bin, "cannot be read: [Errno 2] No such file or directory: '{folder}/text.bin'"),
    (index(lambda content: b"MMIDIDX\x00\x01" + content[9:]), "text.idx is not an index of Megatron's"),
    (lambda folder: megatron(folder, "<u2", code=6), "text.idx is not an index of Megatron's with integer ids"),
    (index(swapped), "text.bin as token ids: text.idx does not describe its sequences one after another"),
    (cut(megatron, 100), f"text.bin as token ids: it has 100 bytes, but text.idx describes {2 * len(IDS):,}"),
    (lambda folder: megatron(folder, "<u2", []), "training.dataset_path = '{folder}/text.bin' holds no token ids"),
    (cut(flat, 101), "text.bin as token ids: its 101 bytes are not whole ids of type <u2"),
    (index(lambda content: content[:-8]), "text.bin as token ids: mmap length is greater than file size"),
    (two_types, "mixes ids of types <u2, <u4"),
]


@pytest.mark.parametrize("write, message", BAD)
def test_bad_files_are_one_line(texts, tokenizer, cache, write, message):
    with pytest.raises(ConfigError) as caught:
        prepared_from(write(texts), tokenizer, text_key="input_ids")
    assert message.replace("{folder}", str(texts)) in str(caught.value) and "\n" not in str(caught.value)
    assert all(path.suffix == ".lock" for path in cache.glob("*"))


@pytest.mark.parametrize("write", [lambda folder: flat(folder, "<u2"), rows(DOCUMENTS)])
def test_ids_need_their_tokenizer(texts, write):
    with pytest.raises(ConfigError, match="the tokenizer that made them; name its folder in model.hf_assets_path$"):
        prepare(DataConfig("files", str(write(texts)), text_key="input_ids"), lambda line: None)
