"""Every setting has one class, so that a new one cannot be forgotten."""

import pytest

from mxtrain.settings.read import known_fields
from mxtrain.settings.resume_classes import ResumeClass, class_of, classes_of, unused_patterns


@pytest.mark.parametrize("name", known_fields())
def test_every_setting_is_in_one_class(name):
    assert len(classes_of(name)) == 1, "put it in one list of mxtrain/settings/resume_classes.py"


def test_every_pattern_names_a_setting():
    assert unused_patterns(known_fields()) == []


def test_a_setting_of_the_users_own_module_is_reported():
    assert classes_of("mine.depth") == [] and class_of("mine.depth") is ResumeClass.APPLIED
