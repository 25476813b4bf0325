import datasets as hf_datasets
import pytest


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A folder of the test's own for ./outputs and all caches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hf_datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
