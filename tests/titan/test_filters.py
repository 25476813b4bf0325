"""Modules that stay: filters from files and flags, and their defaults."""

import pytest

from mxtrain import (
    ConfigError,
)
from mxtrain.settings.read import read_settings
from mxtrain.titan.job_config import parse_job_config
from tests.support.converter_checks import config, converted
from tests.support.releases import only_022


def plain_torchtitan(args):
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(["--job.custom_config_module=mxtrain.titan.job_config", *args])


@pytest.mark.parametrize(
    ("flag", "in_file", "expected"),
    [
        (None, None, None),
        (None, [], []),
        (None, ["wo", "layers.0"], ["wo", "layers.0"]),
        ("", None, []),
        ("", ["wo"], []),
        ("None", ["wo"], None),
        ("wo,layers.0", ["w2"], ["wo", "layers.0"]),
    ],
)
@pytest.mark.parametrize("parse", [parse_job_config, pytest.param(plain_torchtitan, marks=only_022)])
def test_filters_come_from_file_and_flags_and_are_saved(parse, flag, in_file, expected, tmp_path):
    tables = ("mxnorm", "fused_norm", "decompose_k_router")
    lines = [] if in_file is None else [f"[{table}]\nfilter_fqns = {in_file}\n" for table in tables]
    (tmp_path / "job.toml").write_text("".join(lines))
    flags = [] if flag is None else [f"--{table}.filter_fqns={flag}" for table in tables]
    arguments = [f"--job.config_file={tmp_path / 'job.toml'}", *flags]
    job_config, saved = parse(arguments), read_settings(arguments).resolved()
    for table in tables:
        default = None if table == "mxnorm" else []
        wanted = default if (flag, in_file) == (None, None) else expected
        assert getattr(job_config, table).filter_fqns == wanted
        is_saved = wanted is not None and wanted != default
        assert saved.get(table) == ({"filter_fqns": wanted} if is_saved else None)


@pytest.mark.parametrize(
    ("converter", "flags", "message"),
    [
        ("mxnorm", ["--mxnorm.filter_fqns=outputs"], "^mxnorm.filter_fqns: 'outputs' matches no module"),
        ("mx_linear", ["--mxnorm.recipes", "norm", "bf16"], "^mxnorm.recipes: 'norm' names no linear"),
        ("fused_norm", ["--fused_norm.filter_fqns=x"], "^fused_norm.filter_fqns: 'x' matches no module"),
        ("mx_linear", ["--model_args.hidden_dim=600"], "^layers.0.feed_forward.w1: out_features = 600 .*; name it in"),
        ("decompose_k_router", [], "^converter = 'decompose_k_router' finds nothing to convert"),
    ],
)
def test_a_mistake_that_the_model_shows_begins_with_the_full_name_of_the_setting(converter, flags, message):
    with pytest.raises(ConfigError, match=message), converted(config(*flags, converter=converter)):
        pass
