"""Linears that other attributes of a model hold as well are found, and stay."""

import dataclasses
import functools
import types

import pytest
import torch
import torch.nn as nn

from mxtrain import convert
from tests.support.conversion_models import DIM


class Listed(nn.Module):
    """Holds its linears in a list, too, and calls them from there."""

    def __init__(self, held):
        super().__init__()
        self.norm, self.a, self.b = nn.RMSNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.held = held(self)

    def forward(self, x):
        call = self.held if callable(self.held) else next(iter(self.held.values() if "a" in self.held else self.held))
        return self.b(call(self.norm(x)))


class Caller:
    """A plain object, whose attributes are no children of a module."""

    def __init__(self, linear):
        self.linear = linear

    def __call__(self, x):
        return self.linear(x)


@dataclasses.dataclass(slots=True)
class Slots:
    linear: nn.Module
    empty: object = dataclasses.field(init=False)

    def __call__(self, x):
        return self.linear(x)


class MoreSlots(Slots):
    __slots__ = ("other",)


class Registered(dict):
    """A mapping of a model's own class."""


def calling(linear):
    return lambda x: linear(x)


def far(linear):
    """A caller behind a hundred thousand numbers and more objects than Python's stack has frames."""
    caller = Caller(linear)
    for _ in range(2000):
        caller = Caller(caller)
    caller.numbers, caller.itself = list(range(100_000)), caller
    return caller


@pytest.mark.parametrize(
    "held",
    [
        lambda m: [m.a],
        lambda m: (m.a,),
        lambda m: {"a": m.a},
        lambda m: {m.a},
        lambda m: m.a.forward,
        lambda m: functools.partial(m.a.forward),
        lambda m: Caller(m.a),
        lambda m: calling(m.a),
        lambda m: lambda x, linear=m.a: linear(x),
        lambda m: lambda x, *, linear=m.a: linear(x),
        lambda m: Slots(m.a),
        lambda m: MoreSlots(m.a),
        lambda m: Registered(a=m.a),
        lambda m: Caller(Caller(Caller(m.a))),
        lambda m: types.MethodType(lambda self, x, linear=m.a: linear(x), m),
        lambda m: [nn.Sequential(m.a)],
    ],
)
def test_a_linear_that_a_list_holds_as_well_stays(held):
    model = nn.Sequential(Listed(held))
    before = model(torch.ones(3, DIM))
    plan = convert(model, "mx_linear", mode="reference")
    assert plan.linears == ["0.b"]
    assert plan.skipped["0.a"] == (
        "is also held by 0.held, which a swap would not reach: hold it as a child module only"
    )
    assert not torch.equal(model(torch.ones(3, DIM)), before), "b is swapped and used"
    with pytest.raises(ValueError, match="0.norm: (feeds 0.a, is also held by 0.held|its output is used by .*linear)"):
        convert(
            nn.Sequential(Listed(held)),
            mode="reference",
            filter_fqns=[],
            example_inputs=(torch.zeros(3, DIM),),
        )


def test_a_list_that_the_linear_holds_itself_is_followed_from_other_modules_too():
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    model[0].held = model[1].held = [model[0]]
    assert convert(model, "mx_linear", filter_fqns=[]).skipped["0"].startswith("is also held by 1.held, ")


def test_objects_that_hold_each_other_and_many_others_are_followed_in_a_moment():
    model = Listed(lambda m: [m.b])
    model.far = model.norm.far = far(model.a)
    with pytest.raises(ValueError, match="a: is also held by (norm.)?far"):
        convert(model, "mx_linear", mode="reference")


def test_a_linear_that_only_it_itself_holds_is_swapped():
    model = Listed(lambda m: [m.b])
    model.a.state = Caller(model.a)
    assert convert(model, "mx_linear", mode="reference").linears == ["a"]
    model = Listed(lambda m: [m.b])
    model.a.state = model.state = Caller(model.a)
    with pytest.raises(ValueError, match="a: is also held by (a.)?state"):
        convert(model, "mx_linear", mode="reference")
