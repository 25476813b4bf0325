"""The settings that are declared for TorchTitan are those of its release 0.2.2."""

from torchtitan.config import JobConfig

from mxtrain.settings.fields import fields_of
from mxtrain.settings.titan import titan_fields


def test_names_defaults_and_types_are_those_of_torchtitan():
    ours, theirs = titan_fields(), fields_of(JobConfig)
    assert list(ours) == list(theirs)
    for name, field in ours.items():
        assert field.default == theirs[name].default, name
        assert (field.kind == "switch") == (theirs[name].kind == "switch"), name
        assert field.resume is not None, name
