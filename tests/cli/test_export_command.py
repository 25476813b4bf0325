import pytest

from mxtrain import cli
from mxtrain.errors import ConfigError


@pytest.fixture
def seen(monkeypatch):
    """The arguments that the export gets."""
    from mxtrain.titan.hugging_face import export

    calls = []
    monkeypatch.setattr(export, "export", lambda *args, **options: calls.append((args, options)) or "report")
    return calls


def test_the_options_reach_the_export(seen, capsys):
    import torch

    assert cli.main(["export", "a", "b"]) == 0
    words = ["--step", "7", "--fold-gain", "--dtype", "bfloat16", "--loss-tokens", "0", "--device", "cpu"]
    assert cli.main(["export", "a", "b", *words]) == 0
    (paths, plain), (_, given) = seen
    assert [str(path) for path in paths] == ["a", "b"]
    common = {"format": "hf", "loss_tokens": 16384, "device": "", "step": None, "fold_gain": False}
    assert plain == {**common, "dtype": None}
    assert given == {**common, "step": 7, "fold_gain": True, "dtype": torch.bfloat16, "loss_tokens": 0, "device": "cpu"}
    assert capsys.readouterr().out == "report\nreport\n"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--dtype", "float8"], "--dtype = 'float8' is not one of: 'float32', 'bfloat16'"),
        (["--device", "tpu"], "--device = 'tpu' is not one of: '', 'cpu', 'cuda'"),
        (["--loss-tokens", "-1"], "--loss-tokens = -1 is negative; 0 computes no loss"),
    ],
)
def test_wrong_options_are_one_line(words, message, seen, capsys):
    assert cli.main(["export", "a", "b", *words]) == 2
    assert capsys.readouterr().err == f"mxtrain: error: {message}\n" and seen == []


def test_a_device_that_is_not_there_is_one_line(seen, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["export", "a", "b", "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("mxtrain: error: --device = 'cuda': PyTorch sees no GPU") and seen == []


def test_an_error_of_the_export_is_one_line_and_status_2(monkeypatch, capsys):
    from mxtrain.titan.hugging_face import export

    def refuse(*args, **options):
        raise ConfigError("DIR = 'b' exists; choose another folder, or remove it")

    monkeypatch.setattr(export, "export", refuse)
    assert cli.main(["export", "a", "b"]) == 2
    assert capsys.readouterr().err == "mxtrain: error: DIR = 'b' exists; choose another folder, or remove it\n"
