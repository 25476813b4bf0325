"""The converters by name, and how settings become one of them."""

from collections.abc import Mapping
from dataclasses import fields

from mxtrain.conversion.base import Converter
from mxtrain.conversion.kernel_converters import DecomposeKRouterConverter, FusedNormConverter, FusedRMSNormConverter
from mxtrain.conversion.mx_converters import MXLinearConverter, MXNormConverter
from mxtrain.errors import require_one_of

CONVERTERS = {
    converter.name: converter
    for converter in (
        MXNormConverter,
        MXLinearConverter,
        FusedNormConverter,
        FusedRMSNormConverter,
        DecomposeKRouterConverter,
    )
}


def get_converter(name: str, settings: Mapping) -> Converter:
    """The converter of this name with these settings; None stands for a setting's default.

    Raises:
        ConfigError: for an unknown name, a setting that the converter does not have, or a wrong value.
    """
    require_one_of("converter", name, CONVERTERS)
    known = [setting.name for setting in fields(CONVERTERS[name])]
    for setting in settings:
        require_one_of(f"converter = {name!r}: setting", setting, known)
    return CONVERTERS[name](**{setting: value for setting, value in settings.items() if value is not None})
