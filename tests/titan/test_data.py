import json

import pytest

import mxtrain.titan  # noqa: F401  (points TorchTitan at this machine's device)
from mxtrain.errors import ConfigError
from mxtrain.titan import data as titan_data
from mxtrain.titan.data import build_dataloader, build_tokenizer, prepare_from_job
from tests.support.data_checks import VOCABULARY, files_job, job, take, text, validation_loader
from tests.support.jobs import with_setting

pytestmark = pytest.mark.usefixtures("own_folder")


def test_tokenizer_loads_in_torchtitan_with_one_bos_and_one_eos(corpus):
    tokenizer = build_tokenizer(files_job(corpus))
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    ids = tokenizer.encode("abc <|end_of_text|> é", add_bos=True, add_eos=True)
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
    assert ids[-1] == tokenizer.eos_id and ids.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(ids[1:-1]) == "abc <|end_of_text|> é"


@pytest.mark.parametrize("steps, batch, asked", [(3, -1, 0), (4, -1, 512), (2, 12, 0), (3, 12, 576)])
def test_a_text_that_is_read_more_than_once_is_one_line(corpus, monkeypatch, steps, batch, asked):
    """24 to 31 sequences: enough for three steps of 2 x 4, or two of 12."""
    lines = []
    monkeypatch.setattr(titan_data, "note", lines.append)
    corpus.write_text(json.dumps({"text": text(0, 155)}) + "\n")
    flags = [f"--training.steps={steps}", f"--training.global_batch_size={batch}", "--data.validation_share=0"]
    config = files_job(corpus, *flags)
    build_dataloader(2, 0, build_tokenizer(config), config)
    has = len(prepare_from_job(config).train) // 17 * 16
    ends = "each document begins with '<|begin_of_text|>' and ends with '<|end_of_text|>'"
    more = f"the text has {has} tokens, and {steps} steps take {asked}: it is read {asked / has:.1f} times"
    assert lines == [f"text: 1 documents, 0.0 MB; {ends}", *([more] if asked else [])]


def test_an_existing_tokenizer_is_used_and_must_fit_the_model(corpus, tmp_path):
    folder = prepare_from_job(files_job(corpus)).tokenizer
    config = files_job(corpus, f"--model.hf_assets_path={folder}", "--data.vocab_size=0")
    assert prepare_from_job(config).tokenizer == folder
    assert build_tokenizer(config).get_vocab_size() == VOCABULARY
    small = files_job(corpus, f"--model.hf_assets_path={folder}", "--data.vocab_size=290")
    with pytest.raises(ConfigError, match="model.hf_assets_path = .* has 300 tokens, the model 290; set data"):
        build_tokenizer(small)
    text = prepare_from_job(files_job(corpus)).folder
    prepared = files_job(corpus, f"--data.prepared={text}", "--data.vocab_size=290")
    with pytest.raises(ConfigError, match="data.prepared = '.*' has 300 tokens, the model 290; set data"):
        build_tokenizer(prepared)
    with pytest.raises(ConfigError, match="model.hf_assets_path = .* holds no tokenizer.json"):
        build_tokenizer(files_job(corpus, f"--model.hf_assets_path={tmp_path}"))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--training.dataset=pyton"], "training.dataset = 'pyton' is not one of: 'python', 'files', 'hf', 'c4'"),
        (["--training.dataset=python", "--training.dataset_path=x"], "training.dataset_path = 'x' does not apply"),
        (
            ["--training.dataset=python", "--validation.enable", "--validation.dataset=c5"],
            "validation.dataset = 'c5' is not one of: 'python', 'files', 'hf'",
        ),
        (["--training.dataset=c4_test"], "training.dataset = 'c4_test' cannot be opened at 'tests/assets/c4_test'"),
    ],
)
def test_bad_settings_are_config_errors(flags, message):
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(job(*flags))


# Validation


def test_validation_files_of_their_own_are_read_whole(corpus, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"text": text(1000 + i)}) + "\n" for i in range(3)))
    flags = ("--validation.enable", "--validation.dataset=files", f"--validation.dataset_path={own}")
    tokenizer = build_tokenizer(files_job(corpus, *flags))
    tokens = titan_data._held_out(files_job(corpus, *flags))
    decoded = tokenizer.decode(tokens[:].tolist(), skip_special_tokens=True)
    assert decoded == "".join(text(1000 + i) for i in range(3))
    missing = files_job(
        corpus, "--validation.enable", "--validation.dataset=files", "--validation.dataset_path=/nowhere"
    )
    with pytest.raises(ConfigError, match="validation.dataset_path = '/nowhere' does not exist"):
        validation_loader(missing)


def test_validating_on_python_takes_its_held_out_part(corpus):
    config = files_job(corpus, "--validation.enable", "--validation.dataset=python", "--data.max_bytes=600000")
    tokens = titan_data._held_out(config)
    own = prepare_from_job(job("--training.dataset=python", "--data.max_bytes=600000"))
    assert 0 < len(tokens) and tokens.sha256 != own.validation.sha256, "it has the training text's tokenizer"


def test_files_without_a_validation_setting_are_validated_on_their_held_out_part(corpus, tmp_path):
    config = files_job(corpus, "--validation.enable")
    tokens = titan_data._held_out(config)
    assert tokens is prepare_from_job(config).validation and len(tokens) > 0
    assert prepare_from_job(files_job(corpus)).validation is tokens  # the prepared text stays the same
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"text": text(1000)}) + "\n")
    other = titan_data._held_out(files_job(corpus, "--validation.enable", f"--validation.dataset_path={own}"))
    assert other.sha256 != tokens.sha256 and len(other) > len(text(1000)) / 4


def test_nothing_held_out_is_a_config_error(corpus):
    config = files_job(corpus, "--validation.enable", "--validation.dataset=files", "--data.validation_share=0")
    with pytest.raises(ConfigError, match="validation.seq_len = 16 .* there are 0.* raise data.validation_share"):
        validation_loader(config)


# TorchTitan's own datasets


def test_a_text_of_the_users_own_needs_a_validation_setting(monkeypatch):
    monkeypatch.setitem(titan_data.TITAN_DATASETS, "stories", titan_data.TITAN_DATASETS["c4_test"])
    titan_data.check_datasets(job("--training.dataset=stories"))
    with pytest.raises(ConfigError, match="validation.dataset = '' takes documents from training.dataset"):
        titan_data.check_datasets(job("--training.dataset=stories", "--validation.enable"))
    titan_data.check_datasets(job("--training.dataset=stories", "--validation.enable", "--validation.dataset=python"))


def test_torchtitans_own_names_go_to_its_own_code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")  # datasets reads a split out of a path with "test" in it
    (folder / "train.json").write_text("".join(json.dumps({"text": text(i)}) + "\n" for i in range(40)))
    config = job("--training.dataset=c4_test", f"--training.dataset_path={folder}")
    tokenizer = build_tokenizer(config)
    assert tokenizer.get_vocab_size() == VOCABULARY
    loader = build_dataloader(1, 0, tokenizer, config)
    assert type(loader.dataset) is titan_data.Stream
    first = take(loader, 1)[0][0]["input"][0]
    assert first.tolist() == tokenizer.encode(text(0), add_bos=True, add_eos=True)[:16]
    (folder / "train.json").unlink()  # as a network that is gone, after the text was prepared
    with pytest.raises(ConfigError, match=f"^training.dataset = 'c4_test' cannot be opened at '{folder}': [A-Z]"):
        build_dataloader(1, 0, tokenizer, config)


@pytest.mark.parametrize("spelled", ["{}/", "{}/../{name}"])
def test_the_training_text_in_other_words_is_validated_on_its_held_out_part(tmp_path, spelled):
    folder = tmp_path / "text"
    folder.mkdir()
    rows = "".join(json.dumps({"text": f"{row} " * 40}) + "\n" for row in range(120))
    (folder / "a.jsonl").write_text(rows)
    path = spelled.format(folder, name=folder.name)
    config = files_job(folder, "--validation.enable", "--validation.dataset=files", f"--validation.dataset_path={path}")
    assert titan_data._held_out(config) == titan_data.prepare_from_job(config).validation
    config = with_setting(config, "data.prepared", titan_data.prepare_from_job(config).folder.name)
    assert titan_data._held_out(config) == titan_data.prepare_from_job(config).validation
