"""Initial weights depend on seed and name, and follow the distributions that the model's code asks for."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mxtrain.parallel.initial_weights import DrawsByName, draw_by_name, plain_name
from mxtrain.rng.seeds import weight_seed
from mxtrain.titan.releases import RELEASE

CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 48))
        self.bias = nn.Parameter(torch.empty(4000))


class Model(nn.Module):
    def __init__(self, names=("a", "b")):
        super().__init__()
        self.layers = nn.ModuleDict({name: Layer() for name in names})

    @torch.no_grad()
    def init_weights(self):
        for layer in self.layers.values():
            nn.init.normal_(layer.weight, mean=1.0, std=0.5)
            nn.init.uniform_(layer.bias, -3.0, 5.0)


def drawn(model, seed=7) -> dict[str, torch.Tensor]:
    draw_by_name(model, seed, torch.device(DEVICE))
    model.init_weights()
    return {plain_name(name): parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_weight_depends_on_seed_and_name_alone():
    whole, order, part = (drawn(Model(names)) for names in (("a", "b"), ("b", "a"), ("b",)))
    torch.randn(5)
    assert all(torch.equal(drawn(Model())[name], whole[name]) for name in whole)
    assert all(torch.equal(order[name], whole[name]) for name in whole)
    assert all(torch.equal(part[name], whole[name]) for name in part), "a stage of a pipeline has a part of the model"
    assert not torch.equal(whole["layers.a.weight"], whole["layers.b.weight"])
    assert not torch.equal(drawn(Model(), seed=8)["layers.a.weight"], whole["layers.a.weight"])


# ``trunc_normal_`` draws other numbers since PyTorch 2.12 (findings/trunc_normal.sh).
TRUNCATED = {
    "2.11": [[0.0006088307, -0.0347971395, 0.0030064040], [0.0225691106, -0.0304391105, 0.0242880061]],
    "2.12": [[0.0202648323, 0.0024356041, 0.0172395147], [-0.0219347663, -0.0020172938, 0.0355927423]],
}


@pytest.mark.skipif(DEVICE == "cuda", reason="the values are a CPU's")
def test_a_seed_gives_the_same_truncated_numbers_from_pytorch_2_12_on():
    class Truncated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.empty(64, 48)) for _ in range(2))

        def init_weights(self):
            nn.init.trunc_normal_(self.a, std=0.02)
            nn.init.trunc_normal_(self.b, std=0.02, a=-0.06, b=0.06)

    found = torch.stack([weight.flatten()[:3] for weight in drawn(Truncated()).values()])
    is_old = torch.__version__.startswith("2.11.")
    torch.testing.assert_close(found, torch.tensor(TRUNCATED["2.11" if is_old else "2.12"]), rtol=1e-6, atol=0)


def test_wrappers_do_not_change_names():
    wrapped = Model()
    wrapped.layers["a"] = nn.ModuleDict({"_checkpoint_wrapped_module": wrapped.layers["a"]})
    wrapped.layers["b"] = nn.ModuleDict({"_orig_mod": wrapped.layers["b"]})
    layers = [next(iter(layer.values())) for layer in wrapped.layers.values()]
    wrapped.init_weights = lambda: Model.init_weights(SimpleNamespace(layers=dict(enumerate(layers))))
    expected, found = drawn(Model()), drawn(wrapped)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_the_distribution_is_the_one_that_the_model_asks_for():
    found, device_type = drawn(Model()), DEVICE
    for name in "ab":
        weight, bias = found[f"layers.{name}.weight"], found[f"layers.{name}.bias"]
        generator = torch.Generator(device_type).manual_seed(weight_seed(7, f"layers.{name}.weight", 0))
        expected = torch.empty(64, 48, device=device_type).normal_(1.0, 0.5, generator=generator)
        assert torch.equal(weight, expected.cpu())
        generator = torch.Generator(device_type).manual_seed(weight_seed(7, f"layers.{name}.bias", 0))
        expected = torch.empty(4000, device=device_type).uniform_(-3.0, 5.0, generator=generator)
        assert torch.equal(bias, expected.cpu())


@contextmanager
def drawing(*parameters, seed=1):
    model = nn.ParameterDict({f"p{number}": parameter for number, parameter in enumerate(parameters)})
    with torch.no_grad(), DrawsByName(model, seed, CPU):
        yield


def truncated():
    """PyTorch's truncated normal distribution, which draws into new tensors; TorchTitan 0.2.2's, into a float32 copy"""
    if RELEASE == "v02":
        from torchtitan.models.utils import trunc_normal_

        return trunc_normal_
    return nn.init.trunc_normal_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_rejected_are_drawn_again(dtype):
    trunc_normal_ = truncated()
    first, second = (nn.Parameter(torch.empty(100, 100, dtype=dtype)) for _ in range(2))
    with drawing(first, second):
        for parameter in (second, first):
            trunc_normal_(parameter, std=0.5, a=-0.6, b=0.6)
    alone = nn.Parameter(torch.empty(100, 100, dtype=dtype))
    with drawing(alone):
        trunc_normal_(alone, std=0.5, a=-0.6, b=0.6)
    assert torch.equal(alone, first) and not torch.equal(first, second)
    values = first.detach().float()
    # The variance of a normal distribution that is cut off at 1.2 standard deviations is 0.395 of the whole one's.
    assert values.abs().max() <= 0.602 and values.std().item() == pytest.approx(0.5 * 0.395**0.5, rel=0.02)
    assert len(values.unique()) > (6000 if dtype == torch.float32 else 200)


def test_a_second_draw_differs_and_a_shared_parameter_is_one():
    one, two = nn.Parameter(torch.empty(50)), nn.Parameter(torch.empty(50))
    with drawing(one, one, two):
        one.normal_()
        first = one.clone()
        one.normal_()
        second = one.clone()
        two.normal_()
    assert len({tuple(tensor.tolist()) for tensor in (first, second, two)}) == 3
    with drawing(one):
        one.normal_()
    assert torch.equal(one, first)


def test_other_random_numbers_are_the_same_whatever_was_drawn_before():
    def others():
        buffer = torch.empty(9)
        with drawing(parameter):
            buffer.uniform_()
            parameter.normal_()
            return [buffer, torch.randn(9), torch.rand_like(buffer), torch.randperm(9), torch.bernoulli(buffer)]

    parameter = nn.Parameter(torch.empty(9))
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        results.append(others())
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, two) for one, two in zip(*results))
    buffer, normal, like, *_ = results[0]
    assert not torch.equal(buffer, like) and normal.std() > 0


def test_a_weight_is_drawn_in_its_own_dtype():
    parameter = nn.Parameter(torch.empty(9, dtype=torch.float64))
    with drawing(parameter):
        parameter.uniform_()
    assert (parameter != parameter.float()).any()


def test_a_model_on_the_meta_device_stays_there():
    parameter = nn.Parameter(torch.empty(2**45, device="meta"))  # for which no machine has the memory
    with drawing(parameter):
        assert parameter.normal_() is parameter and parameter.is_meta
