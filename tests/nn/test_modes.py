"""The execution mode is that of the device where a forward runs, not of the device where a model was converted."""

import pytest
import torch
import torch.nn as nn

from mxtrain import ConfigError, MXLinear, MXNorm, convert
from mxtrain.formats import hardware
from mxtrain.formats.hardware import MODES, resolve_mode
from tests.support.layer_checks import NormBlock, assert_near, draw, fill, mx_linear, results_of

D, N, T = 64, 32, 5


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that "auto" stands for another mode on the device of the test."""

    def pretend_mode(mode):
        monkeypatch.setattr(hardware, "_cached_mode", lambda asked, _: mode if asked == "auto" else asked)

    return pretend_mode


class Model(nn.Module):
    """A norm, the linear that it feeds, and a linear without a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.up, self.down = nn.Linear(D, N, bias=False), nn.Linear(N, D, bias=False)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


def converted(place="cpu", mode="auto"):
    """A model that was converted on ``place``."""
    with torch.device(place):
        model = Model()
    convert(model, example_inputs=(torch.zeros(1, D),), mode=mode)
    return model


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_model_that_moves_after_its_conversion_runs_in_the_mode_of_its_new_device(place, device):
    model = converted(place)
    model = fill(model.to_empty(device=device) if place == "meta" else model.to(device))
    want = resolve_mode("auto", device)
    assert model.norm(draw(T, D, seed=0)).mode == want
    explicit = converted(device, mode=want)
    explicit.load_state_dict(model.state_dict())
    results = zip(*(results_of(m, draw(T, D, seed=0), draw(T, D, seed=1)) for m in (model, explicit)))
    assert all(torch.equal(got, expected) for got, expected in results)


@pytest.mark.parametrize("layer", [MXLinear, MXNorm])
def test_the_device_is_that_of_the_input(layer):
    """The meta device has no mode, so the error shows which device was looked up, on a machine without a GPU too."""
    sizes = (D, N) if layer is MXLinear else (D,)
    with pytest.raises(ConfigError, match="device type 'meta' is not one of: 'cpu', 'cuda'"):
        layer(*sizes, device="meta")(torch.zeros(T, D, device="meta"))


@pytest.mark.usefixtures("device")
def test_auto_is_looked_up_in_every_forward(pretend):
    """One model gives the results of each mode in turn, bit for bit."""
    x, dys = draw(T, D, seed=0, dtype=torch.bfloat16), [draw(T, N, seed=s, dtype=torch.bfloat16) for s in (1, 2)]
    layers = [
        (lambda mode: mx_linear(D, N, "mxfp8", mode), dys[:1]),
        (lambda mode: NormBlock(D, N, "mxfp8", "mxfp8", mode=mode), dys),
    ]
    for build, of_outputs in layers:
        layer = build("auto")
        for mode in ("reference", "emulated", "reference"):
            pretend(mode)
            results = zip(results_of(layer, x, *of_outputs), results_of(build(mode), x, *of_outputs))
            assert all(torch.equal(got, want) for got, want in results)
    pretend("emulated")
    assert layer.norm(x).mode == "emulated" and layer.norm(x).xhat.data.dtype == torch.bfloat16
    assert layer.norm.mode == "auto", "the layer keeps what was configured"


def test_compiled_auto_is_a_constant_of_the_graph(pretend, compile_backend):
    pretend("emulated")
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    block = torch.compile(NormBlock(D, N, "mxfp8", mode="auto"), backend=compile_backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        results = [results_of(block, x, dy) for _ in range(2)]
    for got in results:
        assert_near(got, results_of(NormBlock(D, N, "mxfp8", mode="emulated"), x, dy), 2e-2)
    norm = torch.compile(MXNorm(D), backend=compile_backend, fullgraph=True)
    assert norm(x).mode == "emulated"


def test_a_mode_of_another_device_is_refused_where_the_forward_runs(monkeypatch):
    """On a machine whose GPU has MX tensor cores, with the model on the CPU."""
    monkeypatch.setattr(hardware, "default_device_type", lambda: "cuda")
    available = hardware._available
    monkeypatch.setattr(hardware, "_available", lambda kind: [*MODES] if kind == "cuda" else available(kind))
    linear, norm = MXLinear(D, N, mode="native", device="cpu"), MXNorm(D, mode="native", device="cpu")
    for layer in (linear, norm):
        with pytest.raises(ConfigError, match="^mode = 'native' cannot run here: needs MX tensor cores .* is a CPU"):
            layer(torch.zeros(T, D, device="cpu"))


def test_a_mode_that_no_device_here_has_is_refused_when_the_layer_is_built(monkeypatch):
    monkeypatch.setattr(hardware, "default_device_type", lambda: "cpu")
    for build in (lambda: MXLinear(D, N, mode="native"), lambda: MXNorm(D, mode="native")):
        with pytest.raises(ConfigError, match="^mode = 'native' cannot run here: needs MX tensor cores"):
            build()
