from dataclasses import fields

import pytest

from mxtrain.data import DataConfig
from mxtrain.errors import ConfigError


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("vocab_size", 257, "data.vocab_size = 257 .* at least 258"),
        ("package_share", 0.0, r"data.package_share = 0.0 is not in \(0, 1\]"),
        ("package_share", 1.5, "data.package_share = 1.5"),
        ("validation_share", 1.0, r"data.validation_share = 1.0 is not in \[0, 1\)"),
        ("validation_share", -0.1, "data.validation_share = -0.1"),
        ("max_bytes", -1, "data.max_bytes = -1"),
        ("seed", -1, "data.seed = -1"),
    ],
)
def test_values_out_of_range_name_the_setting(field, value, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**{field: value})


def test_an_existing_tokenizer_ignores_vocab_size():
    assert DataConfig(vocab_size=0, tokenizer_path="somewhere").vocab_size == 0


def test_identity_omits_settings_that_do_not_change_the_result():
    here = DataConfig(cache_dir="a")
    there = DataConfig(cache_dir="b", section="validation", prepared="c", unseparated=True)
    assert here.identity() == there.identity()
    omitted = {"cache_dir", "prepared", "section", "tokenizer_path", "unseparated"}
    newer = DataConfig(stream_share=0.1, other_files=True).identity()
    assert newer.keys() == {field.name for field in fields(DataConfig)} - omitted
    # Texts from before these settings keep their key.
    assert here.identity().keys() == newer.keys() - {"stream_share", "other_files"}
    assert here.identity() != DataConfig(seed=1).identity()


def test_cache_root_is_the_setting_or_the_environment_or_the_default(tmp_path, monkeypatch, cache):
    assert DataConfig(cache_dir=str(tmp_path / "own")).cache_root() == tmp_path / "own"
    assert DataConfig().cache_root() == cache
    monkeypatch.delenv("MXTRAIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert DataConfig().cache_root() == tmp_path / "home/.cache/mxtrain"


def test_a_cache_that_cannot_be_created_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data.cache_dir = .*: cannot create .*file/cache"):
        DataConfig(cache_dir=str(tmp_path / "file" / "cache")).cache_root()


def test_a_user_that_this_machine_does_not_have_is_part_of_a_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert DataConfig(cache_dir="~nosuchuser/x").cache_path() == tmp_path / "~nosuchuser/x"
