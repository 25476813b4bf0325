"""What editors, type checkers and ``help`` show of ``convert`` is what the converters declare."""

from dataclasses import fields
from inspect import signature
from typing import get_args

from typing_extensions import get_overloads, get_type_hints

from mxtrain import convert
from mxtrain.conversion.convert import ExampleInputs
from mxtrain.conversion.converters import CONVERTERS


def test_overloads_have_the_settings_of_the_converters():
    found = {}
    for overload in get_overloads(convert):
        parameters = signature(overload).parameters
        (settings,) = get_args(parameters["settings"].annotation)
        for name in get_args(parameters["converter"].annotation):
            found[name] = get_type_hints(settings)
    common = {"example_inputs": ExampleInputs, "prefix": str}
    assert found == {
        name: common | {field.name: field.type | None for field in fields(converter)}
        for name, converter in CONVERTERS.items()
    }


def test_help_shows_the_settings_of_every_converter():
    shown = " ".join(convert.__doc__.partition("Settings and their defaults:")[2].split())
    assert shown.startswith("\"mxnorm\": filter_fqns=None, recipe='mxfp8', recipes={}, ")
    for name, converter in CONVERTERS.items():
        settings = ", ".join(f"{field.name}={getattr(converter(), field.name)!r}" for field in fields(converter))
        assert f'"{name}": {settings}' in shown
