"""What editors, type checkers and ``help`` show of ``convert`` is what the converters declare."""

from dataclasses import fields
from inspect import signature
from typing import get_args, get_overloads

from mxtrain import convert
from mxtrain.conversion.converters import CONVERTERS


def test_overloads_have_the_settings_of_the_converters():
    found = {}
    common = ["model", "converter", *list(signature(convert).parameters)[2:-1]]
    for overload in get_overloads(convert):
        parameters = dict(signature(overload).parameters)
        for name in get_args(parameters["converter"].annotation):
            found[name] = {p.name: (p.annotation, p.default) for p in parameters.values() if p.name not in common}
        assert list(parameters)[: len(common)] == common
    assert found == {
        name: {field.name: (field.type | None, getattr(converter(), field.name)) for field in fields(converter)}
        for name, converter in CONVERTERS.items()
    }


def test_help_shows_the_settings_of_every_converter():
    shown = " ".join(convert.__doc__.partition("Settings and their defaults:")[2].split())
    assert shown.startswith("\"mxnorm\": filter_fqns=None, recipe='mxfp8', recipes={}, ")
    for name, converter in CONVERTERS.items():
        settings = ", ".join(f"{field.name}={getattr(converter(), field.name)!r}" for field in fields(converter))
        assert f'"{name}": {settings}' in shown
