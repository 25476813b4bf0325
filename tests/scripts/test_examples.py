"""The examples do what they say: they train, stop, go on as if they had not stopped, and leave a model that loads."""

import importlib

import pytest
import torch
from transformers import AutoModelForCausalLM

import mxtrain


@pytest.fixture
def example(monkeypatch):
    """``example(name)``: the module of an example, on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_plain_loop(example, tmp_path, capsys):
    main = example("plain_loop").main
    whole = main([str(tmp_path / "whole"), "--steps", "8"])
    first = main([str(tmp_path / "parts"), "--steps", "5"])
    assert "norms and 14 linears swapped" in capsys.readouterr().out
    rest = main([str(tmp_path / "parts"), "--steps", "8"])
    assert whole == first + rest and len(rest) == 3
    assert sum(whole[-2:]) / 2 < whole[0] - 0.5
    assert_equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


@pytest.mark.sweep
def test_hugging_face_trainer(example, tmp_path, monkeypatch):
    seen, set_step = [], mxtrain.set_rounding_step
    monkeypatch.setattr(mxtrain, "set_rounding_step", lambda *position: seen.append(position) or set_step(*position))
    main = example("hugging_face_trainer").main
    whole = [row["loss"] for row in main([str(tmp_path / "whole"), "--steps", "12"]) if "loss" in row]
    assert seen[:4] == [(1,), (1, 1), (2,), (2, 1)], "every microbatch has random bits of its own"
    main([str(tmp_path / "parts"), "--steps", "10"])
    parts = [row["loss"] for row in main([str(tmp_path / "parts"), "--steps", "12"]) if "loss" in row]
    assert whole == parts and len(whole) == 12
    assert whole[-1] < whole[0] - 0.5
    assert_equal(weights(tmp_path / "whole" / "model"), weights(tmp_path / "parts" / "model"))
