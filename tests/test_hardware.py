import pytest
import torch

from mxtrain import ConfigError
from mxtrain.hardware import MODES, describe_modes, resolve_mode
from mxtrain.recipe import get_recipe


@pytest.fixture
def capability(monkeypatch):
    def pretend(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")

    return pretend


@pytest.mark.parametrize(
    ("version", "best", "missing"),
    [((10, 0), "native", []), ((9, 0), "emulated", ["native"]), ((7, 5), "reference", ["native", "emulated"])],
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


def test_cpu():
    assert resolve_mode("auto", "cpu") == "reference"
    assert resolve_mode("emulated", "cpu") == "emulated"
    with pytest.raises(
        ConfigError, match="mode = 'native' cannot run here.*use 'auto' or one of: 'emulated', 'reference'"
    ):
        resolve_mode("native", "cpu")


def test_nvfp4_has_no_native_products_yet(capability):
    capability(10, 0)
    recipe = get_recipe("nvfp4")
    assert resolve_mode("auto", "cuda", recipe) == "emulated" and resolve_mode("auto", "cpu", recipe) == "reference"
    assert resolve_mode("auto", "cuda", get_recipe("mxfp8")) == "native"
    with pytest.raises(ConfigError, match="mode = 'native' has no products of recipe 'nvfp4' yet; use 'auto', 'emul"):
        resolve_mode("native", "cuda", recipe)


def test_unknown_mode_and_device():
    with pytest.raises(ConfigError, match="mode = 'fast' is not one of: 'auto', 'native', 'emulated', 'reference'"):
        resolve_mode("fast", "cpu")
    with pytest.raises(ConfigError, match="device type 'tpu'"):
        resolve_mode("auto", "tpu")
