"""No pickle in a checkpoint runs code. test_checkpointer.py has the ways in which a training run loads one."""

import pickle
import random
from pathlib import PosixPath

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from mxtrain.checkpoints.states import RandomState
from mxtrain.checkpoints.storage import load, read_index, unpickle
from mxtrain.errors import ConfigError
from tests.support.hostile_pickles import Code


def test_what_pytorch_writes_is_read(tmp_path):
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
    state = {str(dtype): torch.zeros(2).to(dtype) for dtype in dtypes}
    state |= {"values": {"a": [1, 2.5, None, ("b", b"c"), b""]}, "weight": torch.arange(6.0).view(2, 3)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with open(tmp_path / ".metadata", "rb") as file:
        expected = pickle.load(file)
    index = read_index(tmp_path)
    assert index == expected and isinstance(index.storage_meta.checkpoint_id, PosixPath)
    loaded = {"values": {"a": [0, 0.0, None, ("", b""), b"c"]}, "weight": torch.zeros(2, 3)}
    load(loaded, tmp_path, no_dist=True)
    assert loaded["values"] == state["values"] and torch.equal(loaded["weight"], state["weight"])


def test_a_pickle_runs_no_code(tmp_path, monkeypatch):
    (tmp_path / "in_run_folder.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    hostile = [pickle.dumps(Code(tmp_path / "mark"), protocol) for protocol in range(5)]
    for content in (*hostile, b"cin_run_folder\nx\n."):
        with pytest.raises(ConfigError, match=r"^it cannot be loaded: it names \w+\.\w+, and could run code$"):
            unpickle(content, "it", {})
        with pytest.raises(ConfigError, match="^the states of the random number generators cannot be loaded: "):
            RandomState().load_state_dict({"ranks": pickle.dumps([7])[:-1] + content})
    assert not (tmp_path / "mark").exists()
    with pytest.raises(ConfigError, match="^it cannot be loaded: Ran out of input$"):
        unpickle(b"", "it", {})


def test_a_checkpoint_without_an_index_is_refused(tmp_path):
    for read in (read_index, lambda folder: load({}, folder, no_dist=True)):
        with pytest.raises(ConfigError, match=r"/\.metadata cannot be loaded: No such file or directory$"):
            read(tmp_path)


def test_random_states_have_no_arrays_of_objects():
    """NumPy takes any bytes for pointers to objects: np.ndarray((1,), object, bytes(8))."""
    hostile = pickle.dumps([{"numpy": np.ndarray((1,), object)}], protocol=4)
    with pytest.raises((ConfigError, KeyError)):
        RandomState().load_state_dict({"ranks": hostile})
    states = RandomState().state_dict()
    expected = random.random(), np.random.random()
    RandomState().load_state_dict(states)
    assert (random.random(), np.random.random()) == expected
