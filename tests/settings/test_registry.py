"""The names that are known without imports are those that TorchTitan and mxtrain register."""

from typing import get_args

from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models import _supported_models
from torchtitan.protocols import model_converter, train_spec

import mxtrain.titan  # noqa: F401  registers models and converters
from mxtrain.nn.row_norms import WHEN_COMPILED
from mxtrain.ops.hardware import MODES
from mxtrain.settings import registry, sections


def test_models_and_flavors():
    assert registry.FLAVORS.keys() == _supported_models - {"flux"}  # which takes images, and a trainer of its own
    for name, flavors in registry.FLAVORS.items():
        assert list(train_spec.get_train_spec(name).model_args) == list(flavors)


def test_converters_datasets_and_schedules():
    assert set(registry.CONVERTERS) == model_converter._registry_model_converter_cls.keys()
    assert set(registry.TITAN_DATASETS) == DATASETS.keys()
    for name in registry.PIPELINE_SCHEDULES:
        assert get_schedule_class(name)


def test_choices_of_sections():
    types = {cls: cls.__annotations__ for cls in (sections.MXNorm, sections.FusedNorm)}
    assert get_args(types[sections.MXNorm]["mode"]) == ("auto", *MODES)
    assert get_args(types[sections.FusedNorm]["when_compiled"]) == WHEN_COMPILED
