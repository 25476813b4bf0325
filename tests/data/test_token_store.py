import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from mxtrain.data import token_store
from mxtrain.data.documents import Document, is_held_out
from mxtrain.data.progress import Progress
from mxtrain.data.token_store import TokenFile, tokenize
from mxtrain.data.tokenizer import BOS_TOKEN, EOS_TOKEN, load_tokenizer, train_tokenizer

SILENT = Progress(lambda line: None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, prose):
    folder = tmp_path_factory.mktemp("store") / "tokenizer"
    train_tokenizer([prose(0)], 300, folder, SILENT)
    return load_tokenizer(folder)


def split_documents(tokens: np.ndarray, tokenizer) -> list[str]:
    """Return the texts between each bos and the next eos."""
    starts, ends = (np.flatnonzero(tokens == i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    assert len(starts) == len(ends)
    return [tokenizer.encoder.decode(tokens[s + 1 : e]) for s, e in zip(starts, ends, strict=True)]


def test_each_file_holds_its_documents_in_order(tokenizer, tmp_path, prose, monkeypatch):
    monkeypatch.setattr(token_store, "BATCH_CHARACTERS", 2000)
    documents = [Document(f"doc{i}", prose(i, 40)) for i in range(50)] + [Document("odd", f"a{EOS_TOKEN}\u2028é")]
    files, tallies = tokenize(documents, tokenizer, tmp_path, 0.3, 0, SILENT)
    for split, held_out in (("train", False), ("validation", True)):
        expected = [document.text for document in documents if is_held_out(document.key, 0.3) == held_out]
        tokens = files[split].open()
        assert split_documents(tokens, tokenizer) == expected
        assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert tallies[split].documents == len(expected) > 5
        assert tallies[split].bytes == sum(len(text.encode()) for text in expected)
        assert tallies[split].tokens == files[split].count == len(tokens)


@pytest.mark.parametrize("size, dtype", [(300, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4")])
def test_ids_are_stored_in_the_narrowest_type_that_holds_them(tokenizer, tmp_path, size, dtype):
    files, _ = tokenize([Document("a", "text")], tokenizer._replace(size=size), tmp_path, 0.0, 0, SILENT)
    assert files["train"].dtype == dtype
    assert (tmp_path / "train.bin").stat().st_size == files["train"].count * int(dtype[-1])
    assert split_documents(files["train"].open(), tokenizer) == ["text"]


def test_a_tokenizer_without_bos_separates_documents_with_eos(tokenizer, tmp_path):
    documents = [Document("a", "text"), Document("b", "text")]
    files, _ = tokenize(documents, tokenizer._replace(bos_id=None), tmp_path, 0.0, 0, SILENT)
    tokens = files["train"].open().tolist()
    assert tokens.count(tokenizer.bos_id) == 0
    assert tokens.count(tokenizer.eos_id) == 2 and tokens[-1] == tokenizer.eos_id


def test_bos_and_eos_are_added_once_if_the_tokenizer_adds_bos_itself(tokenizer, tmp_path):
    encoder = Tokenizer.from_str(tokenizer.encoder.to_str())
    encoder.post_processor = TemplateProcessing(
        single=f"{BOS_TOKEN} $0", special_tokens=[(BOS_TOKEN, tokenizer.bos_id)]
    )
    assert encoder.encode("text").ids[0] == tokenizer.bos_id
    files, _ = tokenize([Document("a", "text")], tokenizer._replace(encoder=encoder), tmp_path, 0.0, 0, SILENT)
    tokens = files["train"].open().tolist()
    assert (tokens.count(tokenizer.bos_id), tokens.count(tokenizer.eos_id)) == (1, 1)


def test_an_empty_file_can_be_opened(tmp_path):
    assert TokenFile(tmp_path / "absent.bin", "<u2", 0).open().shape == (0,)
