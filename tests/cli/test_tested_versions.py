import pytest

from mxtrain import cli
from mxtrain.cli import doctor, tested_versions
from mxtrain.cli.tested_versions import untested

NEEDED = ["torch<2.16,>=2.11", "torchtitan==0.2.2", "torchao<0.19,>=0.17", 'pytest>=8; extra == "dev"']


@pytest.fixture(autouse=True)
def needed(monkeypatch):
    monkeypatch.setattr(tested_versions, "requires", lambda name: NEEDED)


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.11.0"), ("torch", "2.13.0+cpu"), ("torchtitan", "0.2.2"), ("torchao", "0.18.1"), ("wandb", "0.1")],
)
def test_tested_versions_and_unknown_packages(name, version):
    assert untested(name, version) == ""


@pytest.mark.parametrize(
    ("name", "version", "advice"),
    [
        ("torch", "2.16.0", "pip install 'torch<2.16,>=2.11'"),
        ("torch", "2.10.1+cu126", "pip install 'torch<2.16,>=2.11'"),
        ("torchao", "0.19.0", "pip install 'torchao<0.19,>=0.17'"),
        ("torchtitan", "0.3.0", "such as 0.3, have other ones); pip install 'torchtitan==0.2.2'"),
    ],
)
def test_a_version_outside_the_range(name, version, advice):
    assert untested(name, version).startswith("not tested: mxtrain was tested with ")
    assert untested(name, version).endswith(advice)


def test_doctor_names_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda name: {"torchtitan": "0.3.0"}.get(name, doctor.MISSING))
    assert cli.main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["torchtitan"]]
    assert "0.3.0; not tested: " in line and "torchtitan==0.2.2" in line
