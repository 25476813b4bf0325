import pytest
import torch

from mxtrain import ConfigError
from mxtrain.ops import hardware
from mxtrain.ops.hardware import MODES, check_mode, describe_modes, resolve_mode


@pytest.fixture
def capability(monkeypatch):
    def pretend(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")

    return pretend


@pytest.mark.parametrize(
    ("version", "best", "missing"),
    [
        ((10, 0), "native", []),
        ((11, 0), "native", []),
        ((9, 0), "emulated", ["native"]),
        ((8, 0), "emulated", ["native"]),
        ((7, 5), "reference", ["native", "emulated"]),
    ],
)
def test_auto_takes_the_best_mode_of_a_gpu(capability, version, best, missing):
    capability(*version)
    assert resolve_mode("auto", "cuda") == best
    assert [s.mode for s in describe_modes("cuda") if not s.available] == missing
    for mode in MODES:
        if mode in missing:
            with pytest.raises(ConfigError, match=f"mode = '{mode}' cannot run here: .*{version[0]}.{version[1]}"):
                resolve_mode(mode, "cuda")
        else:
            assert resolve_mode(mode, "cuda") == mode


@pytest.mark.parametrize("fault", [None, "a trial product in NVFP4 has a relative error of 0.9"])
def test_compute_capability_12_is_native_if_trial_products_are_right(capability, fault, monkeypatch):
    capability(12, 0)
    monkeypatch.setattr("mxtrain.ops.hardware.fault_of_native_products", lambda: fault)
    assert resolve_mode("auto", "cuda") == ("native" if fault is None else "emulated")
    if fault is not None:
        with pytest.raises(ConfigError, match=f"mode = 'native' cannot run here: MX tensor cores found, but {fault} "):
            resolve_mode("native", "cuda")


def test_a_cpu_runs_kernels_in_the_interpreter_only(monkeypatch):
    for interprets in (True, False):
        monkeypatch.setattr(hardware, "_INTERPRETS_TRITON", interprets)
        assert hardware.runs_kernels("emulated", "cpu") == (interprets and hardware.HAS_TRITON)


def test_a_layer_may_have_a_mode_that_only_the_cpu_runs(capability, monkeypatch):
    """Beside a GPU that has no bf16."""
    capability(7, 5)
    monkeypatch.setattr("mxtrain.ops.hardware.default_device_type", lambda: "cuda")
    check_mode("emulated")
    with pytest.raises(ConfigError, match="mode = 'native' cannot run here: MX tensor cores need"):
        check_mode("native")


def test_cpu():
    assert resolve_mode("auto", "cpu") == "reference"
    assert resolve_mode("emulated", "cpu") == "emulated"
    with pytest.raises(
        ConfigError, match="mode = 'native' cannot run here.*use 'auto' or one of: 'emulated', 'reference'"
    ):
        resolve_mode("native", "cpu")


def test_unknown_mode_and_device():
    with pytest.raises(ConfigError, match="mode = 'fast' is not one of: 'auto', 'native', 'emulated', 'reference'"):
        resolve_mode("fast", "cpu")
    with pytest.raises(ConfigError, match="device type 'tpu'"):
        resolve_mode("auto", "tpu")
