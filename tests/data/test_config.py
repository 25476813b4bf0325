from dataclasses import fields

from mxtrain.data import DataConfig


def test_identity_omits_settings_that_do_not_change_the_result():
    here = DataConfig(cache_dir="a")
    there = DataConfig(cache_dir="b", section="validation", prepared="c", unseparated=True)
    assert here.identity() == there.identity()
    omitted = {"cache_dir", "prepared", "section", "tokenizer_path", "unseparated"}
    assert here.identity().keys() == {field.name for field in fields(DataConfig)} - omitted
    assert here.identity() != DataConfig(seed=1).identity()


def test_the_cache_is_the_setting_or_the_environment_or_the_default(tmp_path, monkeypatch, cache):
    assert DataConfig(cache_dir=str(tmp_path / "own")).cache_path() == tmp_path / "own"
    assert DataConfig().cache_path() == cache
    monkeypatch.delenv("MXTRAIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert DataConfig().cache_path() == tmp_path / "home/.cache/mxtrain"


def test_a_user_that_this_machine_does_not_have_is_part_of_a_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert DataConfig(cache_dir="~nosuchuser/x").cache_path() == tmp_path / "~nosuchuser/x"
