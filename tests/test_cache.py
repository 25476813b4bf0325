import pytest

from mxtrain.cache import cache_folder
from mxtrain.errors import ConfigError


def test_a_user_without_a_home_needs_to_name_a_folder(monkeypatch, tmp_path):
    def no_user(number):
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", no_user)
    for name in ("HOME", "MXTRAIN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"^\$MXTRAIN_CACHE: ~/.cache/mxtrain cannot be found .* set it to a folder$"):
        cache_folder()
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_an_address_is_refused(monkeypatch):
    monkeypatch.setenv("MXTRAIN_CACHE", "gs://bucket/cache")
    with pytest.raises(ConfigError, match=r"^\$MXTRAIN_CACHE: gs://bucket/cache cannot be found .is an address"):
        cache_folder()
