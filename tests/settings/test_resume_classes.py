"""Every setting has one class, so that a new one cannot be forgotten."""

from fnmatch import filter as matching

import pytest

from mxtrain.settings.read import known_fields
from mxtrain.settings.resume_classes import CLASSES, ResumeClass, class_of, classes_of


@pytest.mark.parametrize("name", known_fields())
def test_every_setting_is_in_one_class(name):
    assert len(classes_of(name)) == 1, "put it in one list of mxtrain/settings/resume_classes.py"


def test_every_pattern_names_a_setting():
    patterns = [pattern for patterns in CLASSES.values() for pattern in patterns.split()]
    assert [pattern for pattern in patterns if not matching(known_fields(), pattern)] == []


def test_positions_that_only_an_export_names_may_change_and_sizes_may_not():
    assert class_of("model_args.max_seq_len") is ResumeClass.FREE
    assert class_of("model_args.multiple_of") is class_of("model_args.dim") is ResumeClass.REFUSED


def test_a_setting_of_the_users_own_module_is_reported():
    assert classes_of("mine.depth") == [] and class_of("mine.depth") is ResumeClass.APPLIED
