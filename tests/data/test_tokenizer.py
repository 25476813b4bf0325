import json
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from mxtrain.data import tokenizer as tokenizer_module
from mxtrain.data.tokenizer import (
    BOS_TOKEN,
    EOS_TOKEN,
    LONGEST_RUN,
    SPLIT_PATTERN,
    copy_tokenizer,
    load_tokenizer,
    special_tokens,
    tokenizer_hash,
    train_tokenizer,
)
from mxtrain.errors import ConfigError


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prose):
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    train_tokenizer([prose(seed) for seed in range(10)], 400, folder, silent)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    return load_tokenizer(folder)


def test_the_vocabulary_has_the_requested_size(trained):
    assert trained.size == 400
    assert trained.encoder.get_vocab_size() == 400
    assert (trained.bos_id, trained.eos_id) == (0, 1)


def test_the_same_text_gives_the_same_tokenizer(folder, tmp_path, prose):
    train_tokenizer([prose(seed) for seed in range(10)], 400, tmp_path / "again", silent)
    assert tokenizer_hash(tmp_path / "again") == tokenizer_hash(folder)
    train_tokenizer([prose(seed) for seed in range(9)], 400, tmp_path / "other", silent)
    assert tokenizer_hash(tmp_path / "other") != tokenizer_hash(folder)
    (tmp_path / "again" / "tokenizer_config.json").write_text("{}")  # no bos, no eos
    assert tokenizer_hash(tmp_path / "again") != tokenizer_hash(folder)


@given(st.text() | st.text(alphabet=" \t\r\n\u00a0\u2028a_1'", max_size=60))
def test_any_text_is_restored_by_decoding(trained, text):
    ids = trained.encoder.encode(text, add_special_tokens=False).ids
    assert trained.encoder.decode(ids) == text
    assert trained.bos_id not in ids and trained.eos_id not in ids


def test_the_spelling_of_a_special_token_is_plain_text(trained):
    text = f"a{EOS_TOKEN}b{BOS_TOKEN}"
    ids = trained.encoder.encode(text, add_special_tokens=False).ids
    assert trained.bos_id not in ids and trained.eos_id not in ids
    assert trained.encoder.decode(ids) == text


def test_indentation_is_one_token(tmp_path):
    train_tokenizer(["if a:\n    if b:\n        pass\n" * 20], 300, tmp_path / "code", silent)
    encoder = load_tokenizer(tmp_path / "code").encoder
    assert encoder.encode("a\n        b").tokens == ["a", "Ċ", "ĠĠĠĠĠĠĠ", "Ġb"]


def test_training_reads_no_more_than_the_sample_limit(tmp_path, prose, monkeypatch):
    texts = [prose(seed) for seed in range(10)]
    train_tokenizer(texts[:3], 300, tmp_path / "three", silent)
    monkeypatch.setattr(tokenizer_module, "SAMPLE_BYTES", sum(map(len, texts[:3])))
    unread = iter(texts)
    train_tokenizer(unread, 300, tmp_path / "sample", silent)
    assert tokenizer_hash(tmp_path / "sample") == tokenizer_hash(tmp_path / "three")
    assert len(list(unread)) == 6
    train_tokenizer(["".join(texts)], 300, tmp_path / "one", silent)
    assert load_tokenizer(tmp_path / "one").size == 300


def test_training_cuts_long_runs_and_the_tokenizer_does_not(tmp_path, monkeypatch):
    """Quadratic time: a run of 160,000 letters took 7 s, and one of 1,600,000 did not end in 10 minutes."""
    runs = ["".join(random.Random(seed).choices("ACGT", k=2560)) for seed in range(3)]
    parts = [run[start : start + LONGEST_RUN] for run in runs for start in range(0, len(run), LONGEST_RUN)]
    for name, texts in (("runs", runs), ("parts", parts)):
        train_tokenizer(texts, 400, tmp_path / name, silent)
    assert tokenizer_hash(tmp_path / "runs") == tokenizer_hash(tmp_path / "parts")
    encoder = load_tokenizer(tmp_path / "runs").encoder
    assert len(encoder.pre_tokenizer.pre_tokenize_str(runs[0])) == 1
    # Other texts have the tokenizer that they had.
    texts = [f"{run[:255]}! {run[:200]}\n" for run in runs]
    train_tokenizer(texts, 400, tmp_path / "bounded", silent)
    monkeypatch.setattr(tokenizer_module, "TRAINING_PATTERN", SPLIT_PATTERN)
    train_tokenizer(texts, 400, tmp_path / "whole", silent)
    assert tokenizer_hash(tmp_path / "bounded") == tokenizer_hash(tmp_path / "whole")


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>", "special": True}])
def test_an_existing_tokenizer_may_have_no_eos(folder, tmp_path, token):
    text = (folder / "tokenizer.json").read_text().replace(json.dumps(BOS_TOKEN), '"<s>"')
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": token, "eos_token": None}))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_id, loaded.eos_id) == (0, None)


GPT2, FAST = {"model_type": "gpt2"}, {"tokenizer_class": "PreTrainedTokenizerFast"}
BOTH, NONE = {"bos_token": "<s>", "eos_token": "</s>"}, {"bos_token": None, "eos_token": None}
ENDS = ("<|endoftext|>", "<|endoftext|>")

# tokenizer_config.json, special_tokens_map.json, config.json, (bos, eos).
KINDS = {
    "config": (BOTH, None, None, ("<s>", "</s>")),
    "map": (FAST, {"eos_token": {"content": "</s>"}}, None, (None, "</s>")),
    "map beside config": (BOTH, {"bos_token": "</s>"}, GPT2, ("</s>", "</s>")),
    "map beside decoder": (BOTH | {"added_tokens_decoder": {}}, {"bos_token": "</s>"}, GPT2, ("<s>", "</s>")),
    "class": ({"tokenizer_class": "GPT2Tokenizer"}, None, None, ENDS),
    "class of the model": ({"model_max_length": 1024}, None, GPT2, ENDS),
    "class without files": (None, None, GPT2, ENDS),
    "class beside config": ({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}, None, None, (ENDS[0], "</s>")),
    "null": ({"tokenizer_class": "Qwen2Tokenizer"} | NONE, None, None, (None, None)),
    "tokenizer.json": (FAST, None, None, (None, None)),
}


def write_kind(folder, config, tokens, model):
    """A tokenizer with "<|endoftext|>", "<s>" and "</s>"; what it names follows from the files."""
    vocabulary = {letter: i for i, letter in enumerate("abcdefgh ")}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    tokenizer.add_special_tokens(["<|endoftext|>", "<s>", "</s>"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config.json": config, "special_tokens_map.json": tokens, "config.json": model}
    for name, content in files.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_those_of_transformers(tmp_path, kind):
    from transformers import AutoTokenizer

    *files, expected = KINDS[kind]
    theirs = AutoTokenizer.from_pretrained(write_kind(tmp_path, *files))
    own = load_tokenizer(tmp_path)
    names = tuple(None if i is None else own.encoder.id_to_token(i) for i in (own.bos_id, own.eos_id))
    assert names == expected == (theirs.bos_token, theirs.eos_token)
    copy_tokenizer(tmp_path, tmp_path / "copy")  # which has no config.json
    copied = load_tokenizer(tmp_path / "copy")
    assert (copied.bos_id, copied.eos_id) == (own.bos_id, own.eos_id)
    assert tokenizer_hash(tmp_path / "copy") == tokenizer_hash(tmp_path), "runs of earlier versions keep their hash"


def test_truncation_and_padding_of_another_program_are_left_out(tmp_path):
    from transformers import AutoTokenizer

    loaded = load_tokenizer(write_kind(tmp_path, *KINDS["config"][:3]))
    ids = loaded.encoder.encode("abcdefgh").ids
    assert ids == list(range(8)) == AutoTokenizer.from_pretrained(tmp_path)("abcdefgh")["input_ids"]
    assert loaded.encoder.encode("a").ids == [0]
    assert loaded.separators == "begins with '<s>' and ends with '</s>'"


def test_the_class_of_a_tokenizer_takes_transformers(tmp_path, monkeypatch):
    write_kind(tmp_path, *KINDS["class"][:3])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r'and failed \(.*\); pip install "mxtrain\[hf\]", or name both'):
        load_tokenizer(tmp_path)


def test_size_is_the_largest_id_plus_one(tmp_path):
    Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).size == 6


def test_a_copy_keeps_no_file_of_the_tokenizer_before(folder, tmp_path):
    """Its bos and eos would be those of another tokenizer."""
    source, target = tmp_path / "source", tmp_path / "target"
    copy_tokenizer(folder, source)
    (source / "model.safetensors").touch()
    assert tokenizer_hash(source) == tokenizer_hash(folder)
    copy_tokenizer(folder, target)
    (source / "tokenizer_config.json").unlink()
    (target / "weights").touch()
    copy_tokenizer(source, target)
    assert tokenizer_hash(target) == tokenizer_hash(source) != tokenizer_hash(folder)
    assert sorted(path.name for path in target.iterdir()) == ["tokenizer.json", "weights"]
    copy_tokenizer(target, target)
    assert tokenizer_hash(target) == tokenizer_hash(source)


def test_a_copy_keeps_special_tokens_besides_bos_and_eos(folder, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    copy_tokenizer(folder, source)
    (source / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "bos_token": "<|begin_of_text|>"}')
    copy_tokenizer(source, target)
    assert json.loads((target / "special_tokens_map.json").read_text())["pad_token"] == "<pad>"
    assert special_tokens(target, "") == special_tokens(source, "")


def test_a_copy_is_whole_or_the_one_before(folder, tmp_path, full_disk):
    target = tmp_path / "target"
    copy_tokenizer(folder, target)
    before, file = tokenizer_hash(target), target / "tokenizer.json"
    inode = file.stat().st_ino
    copy_tokenizer(folder, target)
    assert file.stat().st_ino == inode, "an equal one is not written again"
    source = tmp_path / "source"
    copy_tokenizer(folder, source)
    (source / "tokenizer.json").write_text(file.read_text() + " ")
    with full_disk(1000), pytest.raises(OSError, match="File too large"):
        copy_tokenizer(source, target)
    assert tokenizer_hash(target) == before
