"""Mode "fp8_merged": the share of codes that merging changes, and the layers that give the mode up."""

import pytest
import torch
from torch import nn

import mxtrain
from mxtrain.analysis.metrics_file import NUMERICS
from mxtrain.diagnostics.linears import Input, linear_figures, linear_totals
from mxtrain.diagnostics.merge_guard import MergeGuard
from mxtrain.diagnostics.recording import Numerics, sampled_tokens
from mxtrain.diagnostics.totals import numbers
from mxtrain.formats import hardware
from mxtrain.formats.hardware import MERGED
from mxtrain.formats.matrices import Codes
from mxtrain.formats.mx.merged import changed_elements, merge, values_of
from mxtrain.formats.mx.reference import cast, dequantize, scale_values
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.ready_weights import ReadyWeights
from mxtrain.nn.split import WHOLE
from mxtrain.nn.three_gemms import ThreeGEMMs
from mxtrain.rng.rounding import set_rounding_step
from tests.support.kernel_checks import draw, ugly

CASTS = ("fprop_input", "fprop_weight", "dgrad_grad", "dgrad_weight", "wgrad_grad", "wgrad_input")


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", [2080, 96])
def test_changed_elements_are_those_that_merging_changes(rows, dim, tiles):
    x = ugly(rows, 128 + 32, seed=rows)[10:].contiguous()[: rows // 32 * 32 - 32]
    codes = Codes(*cast(x if dim == 1 else x.t(), MXFP8, "rceil"))
    own = dequantize(*codes[:2], MXFP8)
    merged = values_of(merge(codes, tiles), torch.float32)[:, : own.shape[1]]
    want = (own != merged).sum().item()
    scales = scale_values(codes.scales.view(torch.uint8).int())
    assert 0 < want < own.numel()
    got = changed_elements(own if dim == 1 else own.t(), scales if dim == 1 else scales.t(), dim, tiles)
    assert got.item() == want


def figures_of(mode, x, w, dy, recipe="mxfp8"):
    gemms = ThreeGEMMs(get_recipe(recipe).key, mode, WHOLE)
    found = linear_totals(gemms, Input(x), w, dy, None, None)
    return linear_figures({name: totals for (name, *_), totals in numbers({(n,): t for n, t in found.items()}).items()})


def test_figures_of_a_linear():
    x, w, dy = draw(128, 256), draw(128, 256, seed=1), draw(128, 128, seed=2)
    x[:, ::64] *= 2.0**9  # in half of the blocks
    dy[::64] *= 2.0**9
    figures = figures_of(MERGED, x, w, dy)
    shares = {cast: figures.pop(f"{cast}_merged") for cast in CASTS}
    assert figures == figures_of("emulated", x, w, dy), "other figures are those of the same codes"
    assert shares["fprop_input"] > 2e-3 and shares["wgrad_grad"] > 2e-3
    assert max(shares["fprop_weight"], shares["dgrad_weight"], shares["dgrad_grad"]) < 1e-3
    own = figures_of(MERGED, x, w, dy, "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=bf16")
    assert {key for key in own if key.endswith("_merged")} == {"fprop_input_merged", "fprop_weight_merged"}


def test_tokens_are_sampled_in_groups_that_merge():
    assert sampled_tokens(1024, 256, torch.device("cpu"), MERGED).tolist() == [*range(128), *range(512, 640)]
    assert len(sampled_tokens(96, 256, torch.device("cpu"), MERGED)) == 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.gate = nn.RMSNorm(128), nn.Linear(128, 128), nn.Linear(128, 128)
        self.down = nn.Linear(128, 128, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(torch.relu(self.up(y)) * self.gate(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model(monkeypatch):
    """Without the interpreter, which takes seconds for tiles of 128 x 128."""
    monkeypatch.setattr(hardware, "_INTERPRETS_TRITON", False)
    torch.manual_seed(0)
    model = Model()
    mxtrain.convert(model, example_inputs=(torch.randn(1, 32, 128),), mode=MERGED, filter_fqns=[])
    set_rounding_step(0)
    yield model
    torch._dynamo.reset()


def modes(model):
    return {fqn: module.mode for fqn, module in model.named_modules() if hasattr(module, "mode")}


OF_A_NORM = [f"layers.1.{name}" for name in ("norm", "up", "gate")]


def test_a_layer_above_the_limit_multiplies_images_with_all_that_share_its_casts(model):
    model.layers[1].gate.weight.data[:, :32] *= 2.0**14
    x = torch.randn(1, 128, 128)
    numerics, told = Numerics(1, None, 128, [model]), []
    guard = MergeGuard(0.01, [model], lambda fqn: fqn, lambda *event: told.append(event))
    ready = ReadyWeights([model])
    ready.refresh()
    compiled = torch.compile(model, backend="eager")
    before = compiled(x)
    with numerics.recording():
        model(x).sum().backward()
    figures = numerics.figures()
    guard.check(7, figures)
    assert guard.images == ["layers.1.gate"]
    assert {fqn for fqn, mode in modes(model).items() if mode == "emulated"} == {*OF_A_NORM}
    largest = max(share for key, share in figures.items() if key.endswith("_merged"))
    limit = f"mxnorm.merge_limit = 0.01, found up to {largest:.2g}; layers so far: 1"
    assert told == [(7, f"layers.1.gate: multiplies images from now on ({limit})")]
    assert all(mode in (MERGED, "emulated") for mode in modes(model).values())
    ready.refresh()
    after = compiled(x)
    assert torch.equal(after, model(x)) and not torch.equal(after, before)

    # A resumed run.
    again = Model()
    mxtrain.convert(again, example_inputs=(torch.randn(1, 32, 128),), mode=MERGED, filter_fqns=[])
    MergeGuard(0.01, [again], lambda fqn: fqn, None).restore([*guard.images, "a layer of another stage"])
    assert modes(again) == modes(model)


def test_layers_with_the_same_fault_share_a_line_and_a_limit_is_not_its_excess(model):
    told = []
    guard = MergeGuard(0.02, [model], lambda fqn: fqn, lambda *event: told.append(event))
    guard.check(1, {f"{NUMERICS}layers.{i}.down/wgrad_input_merged": 0.02 for i in range(3)})
    guard.check(2, {})
    assert not told and not guard.images
    guard.check(3, {f"{NUMERICS}layers.{i}.down/wgrad_input_merged": 0.03 for i in (2, 1, 0)})
    limit = "mxnorm.merge_limit = 0.02, found up to 0.03; layers so far: 3"
    assert told == [(3, f"layers.0-2.down: multiplies images from now on ({limit})")]
    assert guard.images == [f"layers.{i}.down" for i in range(3)]
