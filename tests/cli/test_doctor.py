import platform
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from mxtrain import ConfigError, cli
from mxtrain.cli import doctor
from mxtrain.kernels import decompose_k
from mxtrain.kernels.row_norms import backward_plan, forward_plan
from mxtrain.ops.hardware import MODES


def test_doctor_prints_versions_devices_and_modes(capsys):
    assert cli.main(["doctor"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    facts = {words[0]: words[1:] for words in lines}
    assert facts["python"] == [platform.python_version()]
    assert facts["torch"] == [version("torch")]
    assert "cpu" in facts and "cores," in facts["cpu"]
    assert all(facts[mode][0] in ("yes:", "no:") for mode in MODES) and facts["auto"][0] in MODES


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
    monkeypatch.setattr(doctor, "estimators", lambda: [("pre_round", "1 us")])  # there is no GPU to measure
    assert f"  auto       {mode} on cuda, whatever the recipe\n" in doctor.report()


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


@pytest.mark.parametrize(
    ("shape", "variant", "norm"),
    [
        ((32768, 768), "persistent", "rms"),
        ((512, 65536), "looped", "rms"),
        ((4096, 12288), "looped", "layer"),
    ],
)
def test_the_norm_of_a_shape_is_explained(shape, variant, norm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    title, _, *lines = doctor.explain_norm(*shape, norm=norm).splitlines()
    name = {"rms": "RMSNorm", "layer": "LayerNorm"}[norm]
    assert title == f"{name} of {shape[0]} x {shape[1]}, bfloat16, on 132 SMs (no GPU here)"
    backward = lines.index("backward")
    assert lines[1].split()[:2] == ["variant", f"{variant}:"]
    plans = forward_plan(*shape, norm == "layer"), backward_plan(*shape, norm == "layer")
    for part, plan in zip((lines[1 : backward - 1], lines[backward + 1 :]), plans):
        facts = {name: text.strip() for name, text in (line.strip().split("  ", 1) for line in part)}
        del facts["variant"]
        assert list(map(int, facts.values())) == list(plan[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 64), "--explain-norm 0 64: expected at least 1 row, of 1 to 65536 columns"),
        ((4, 65537), "--explain-norm 4 65537: expected"),
        ((4, 0), "--explain-norm 4 0: expected"),
        ((4, 64, "float64"), "--dtype = 'float64' is not one of: 'bfloat16', 'float16', 'float32'"),
        ((4, 64, "bfloat16", "group"), "--norm = 'group' is not one of: 'rms', 'layer'"),
    ],
)
def test_a_norm_that_cannot_be_explained(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"^{message}"):
        doctor.explain_norm(*arguments)


PLANS = [
    (None, {"route": "mm: one torch.mm"}),
    (
        decompose_k.Plan(8, 16, 32, 64, 2, 3),
        {
            "route": "triton: two launches",
            "splits": "8",
            "tile": "16 x 32, 64 of K at once",
            "warps": "2",
            "stages": "3",
        },
    ),
    (decompose_k.Plan(1, 16, 32, 64, 2, 3), {"route": "triton: one launch"}),
]


@pytest.mark.parametrize(("plan", "told"), PLANS)
def test_the_route_of_a_router_is_explained(plan, told, monkeypatch):
    asked = []

    def choose(*arguments):
        asked.append(arguments)
        return decompose_k.Choice(plan, "because")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(decompose_k, "choose", choose)
    title, _, *lines = doctor.explain_router(64, 16, 2048, "float16").splitlines()
    assert title == "router of 64 tokens of 2048 to 16 experts, float16, on 132 SMs (no GPU here)"
    device = torch.device("cpu")
    assert asked == [(64, 16, 2048, torch.float16, device, True), (16, 2048, 64, torch.float16, device, False)]
    gradient = lines.index("gradient of the weight, [16, 64] x [64, 2048]")
    assert lines[0] == "forward, [64, 2048] x [2048, 16]"
    for part in (lines[1 : gradient - 1], lines[gradient + 1 :]):
        facts = {name: text.strip() for name, text in (line.strip().split("  ", 1) for line in part)}
        assert facts.items() >= (told | {"why": "because"}).items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 16, 64), "--explain-router 0 16 64: expected sizes of at least 1"),
        ((4, 16, -1), "--explain-router 4 16 -1: expected sizes"),
        ((4, 16, 64, "float64"), "--dtype = 'float64' is not one of: 'bfloat16', 'float16', 'float32'"),
    ],
)
def test_a_router_that_cannot_be_explained(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"^{message}"):
        doctor.explain_router(*arguments)


def test_without_triton_there_is_nothing_to_explain(monkeypatch):
    monkeypatch.setattr(doctor, "HAS_TRITON", False)
    with pytest.raises(ConfigError, match="^--explain-router is about Triton kernels, and Triton is not installed"):
        doctor.explain_router(4, 16, 64)


NEEDED = ["torch<2.16,>=2.11", "torchtitan==0.2.2", "torchao<0.19,>=0.17", 'pytest>=8; extra == "dev"']


@pytest.fixture
def needed(monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda name: NEEDED)


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.11.0"), ("torch", "2.13.0+cpu"), ("torchtitan", "0.2.2"), ("torchao", "0.18.1"), ("wandb", "0.1")],
)
def test_tested_versions_and_unknown_packages(name, version, needed):
    assert doctor.untested(name, version) == ""


@pytest.mark.parametrize(
    ("name", "version", "advice"),
    [
        ("torch", "2.16.0", "pip install 'torch<2.16,>=2.11'"),
        ("torch", "2.10.1+cu126", "pip install 'torch<2.16,>=2.11'"),
        ("torchao", "0.19.0", "pip install 'torchao<0.19,>=0.17'"),
        ("torchtitan", "0.3.0", "such as 0.3, have other ones); pip install 'torchtitan==0.2.2'"),
    ],
)
def test_a_version_outside_the_range(name, version, advice, needed):
    assert doctor.untested(name, version).startswith("not tested: mxtrain was tested with ")
    assert doctor.untested(name, version).endswith(advice)


def test_doctor_names_an_untested_version(monkeypatch, capsys, needed):
    monkeypatch.setattr(doctor, "_version", lambda name: {"torchtitan": "0.3.0"}.get(name, doctor.MISSING))
    assert cli.main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["torchtitan"]]
    assert "0.3.0; not tested: " in line and "torchtitan==0.2.2" in line
