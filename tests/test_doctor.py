import platform
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from mxtrain import cli, doctor
from mxtrain.hardware import MODES
from mxtrain.recipe import RECIPES


def test_doctor_prints_versions_devices_and_a_mode_for_every_recipe(capsys):
    assert cli.main(["doctor"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    facts = {words[0]: words[1:] for words in lines}
    assert facts["python"] == [platform.python_version()]
    assert facts["torch"] == [version("torch")]
    assert "cpu" in facts and "cores," in facts["cpu"]
    assert all(mode in facts for mode in MODES)
    assert all(facts[recipe][0] in MODES for recipe in RECIPES)


@pytest.mark.parametrize("capability, mode", [((9, 0), "emulated"), ((10, 0), "native")])
def test_on_a_gpu_its_capability_decides_the_mode(monkeypatch, capability, mode):
    gpu = SimpleNamespace(name="NVIDIA H200", major=capability[0], minor=capability[1], total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu.name)
    major, minor = capability
    assert doctor.devices()[1:] == [
        (f"cuda:{index}", f"NVIDIA H200, compute capability {major}.{minor}, 141 GiB") for index in range(2)
    ]
    assert {name: text.split(" on cuda: ")[0] for name, text in doctor.recipes()} == dict.fromkeys(RECIPES, mode)


def test_a_gpu_that_pytorch_cannot_use_is_listed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "nvidia_gpus", lambda: ["NVIDIA H200"])
    ((device, text),) = doctor.devices()[1:]
    assert device == "unused" and text.startswith("NVIDIA H200: PyTorch ") and "sees no GPU" in text


def test_a_missing_package_is_told():
    assert doctor._version("no-such-package-here") == "not installed"


@pytest.mark.parametrize("pre_round, exact, advice", [(27.0, 27.1, "take 'exact'"), (20.0, 25.0, "saves 20%")])
def test_advice_follows_the_measurement(pre_round, exact, advice):
    assert advice in doctor.advise(pre_round, exact)


def test_estimators_are_timed_on_a_gpu_only():
    rows = dict(doctor.estimators())
    if torch.cuda.is_available():
        assert float(rows["pre_round"].split()[0]) > 0 and float(rows["exact"].split()[0]) > 0 and rows["advice"]
    else:
        assert rows == {"not measured": "needs a CUDA device and Triton"}
