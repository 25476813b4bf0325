import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from mxtrain.data import tokenizer as tokenizer_module
from mxtrain.data.progress import Progress
from mxtrain.data.tokenizer import (
    BOS_TOKEN,
    EOS_TOKEN,
    copy_tokenizer,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from mxtrain.errors import ConfigError

SILENT = Progress(lambda line: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prose):
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    train_tokenizer([prose(seed) for seed in range(10)], 400, folder, SILENT)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    return load_tokenizer(folder)


def test_the_vocabulary_has_the_requested_size(trained):
    assert trained.size == 400
    assert trained.encoder.get_vocab_size() == 400
    assert (trained.bos_id, trained.eos_id) == (0, 1)


def test_a_short_text_gives_a_smaller_vocabulary(tmp_path):
    train_tokenizer(["abc abc"], 400, tmp_path / "poor", SILENT)
    assert 258 < load_tokenizer(tmp_path / "poor").size < 270


def test_the_same_text_gives_the_same_tokenizer(folder, tmp_path, prose):
    train_tokenizer([prose(seed) for seed in range(10)], 400, tmp_path / "again", SILENT)
    assert tokenizer_hash(tmp_path / "again") == tokenizer_hash(folder)
    train_tokenizer([prose(seed) for seed in range(9)], 400, tmp_path / "other", SILENT)
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
    train_tokenizer(["if a:\n    if b:\n        pass\n" * 20], 300, tmp_path / "code", SILENT)
    encoder = load_tokenizer(tmp_path / "code").encoder
    assert encoder.encode("a\n        b").tokens == ["a", "Ċ", "ĠĠĠĠĠĠĠ", "Ġb"]


def test_training_reads_no_more_than_the_sample_limit(tmp_path, prose, monkeypatch):
    texts = [prose(seed) for seed in range(10)]
    train_tokenizer(texts[:3], 300, tmp_path / "three", SILENT)
    monkeypatch.setattr(tokenizer_module, "SAMPLE_BYTES", sum(map(len, texts[:3])))
    unread = iter(texts)
    train_tokenizer(unread, 300, tmp_path / "sample", SILENT)
    assert tokenizer_hash(tmp_path / "sample") == tokenizer_hash(tmp_path / "three")
    assert len(list(unread)) == 6


def test_an_error_while_reading_texts_reaches_the_caller(tmp_path):
    def texts():
        yield "some text"
        raise ConfigError("the third file is broken")

    with pytest.raises(ConfigError, match="the third file is broken"):
        train_tokenizer(texts(), 300, tmp_path / "broken", SILENT)


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>", "special": True}])
def test_an_existing_tokenizer_may_have_no_eos(folder, tmp_path, token):
    text = (folder / "tokenizer.json").read_text().replace(json.dumps(BOS_TOKEN), '"<s>"')
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": token, "eos_token": None}))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_id, loaded.eos_id) == (0, None)


def test_size_is_the_largest_id_plus_one(tmp_path):
    Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).size == 6


def test_a_folder_without_a_tokenizer_is_a_config_error(folder, tmp_path):
    with pytest.raises(ConfigError, match="model.hf_assets_path = '.*none' is not a folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ConfigError, match="model.hf_assets_path = .* holds no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ConfigError, match="names eos_token '</s>', absent from tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_copy_keeps_no_file_of_the_tokenizer_before(folder, tmp_path):
    """Its bos and eos would be those of another tokenizer."""
    source, target = tmp_path / "source", tmp_path / "target"
    copy_tokenizer(folder, source)
    assert tokenizer_hash(source) == tokenizer_hash(folder)
    copy_tokenizer(folder, target)
    (source / "tokenizer_config.json").unlink()
    (target / "weights").touch()
    copy_tokenizer(source, target)
    assert tokenizer_hash(target) == tokenizer_hash(source) != tokenizer_hash(folder)
    assert sorted(path.name for path in target.iterdir()) == ["tokenizer.json", "weights"]
    copy_tokenizer(target, target)
    assert tokenizer_hash(target) == tokenizer_hash(source)


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
