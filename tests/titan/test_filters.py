"""Modules that stay: filters from files and flags, and their defaults."""

import pytest
import torch.nn as nn

from mxtrain import (
    ConfigError,
    MXLinear,
    MXNorm,
    MXNormLinear,
)
from mxtrain.settings.read import read_settings
from mxtrain.titan.converters import convert_on_meta, titan_converter
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.releases import engine
from tests.support.converter_checks import config, converted, count, model_and_args
from tests.support.releases import only_022


def test_filters_reach_the_conversion():
    flags = ["--mxnorm.filter_fqns=output,layers.3.feed_forward", "--mxnorm.mode=reference"]
    names = ("ffn_norm", "feed_forward.w2", "attention_norm", "attention.wo")
    with converted(config(*flags)) as modules:
        kinds = [type(modules[f"layers.3.{name}"]) for name in names]
    assert kinds == [nn.RMSNorm, nn.Linear, MXNorm, MXLinear]


@only_022
def test_unset_filters_keep_the_head_whatever_it_is_called():
    assert config().mxnorm.filter_fqns is None
    model, _ = model_and_args("llama3", "debugmodel")
    model.to_vocabulary = model.output
    del model.output
    titan_converter("mx_linear", config(converter="mx_linear")).convert(model)
    assert type(model.to_vocabulary) is nn.Linear and count(model, nn.Linear) == 1


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


def test_a_linear_with_one_feature_stays():
    """As the gate of a shared expert in a user's own model."""
    job_config = config(converter="mx_linear")
    model = engine().build_on_meta(job_config)
    model.layers["0"].shared_expert_gate = nn.Linear(256, 1, device="meta")
    plan = convert_on_meta(job_config, model)["mx_linear"]
    assert plan.skipped["layers.0.shared_expert_gate"].startswith("out_features = 1 is not a multiple of")


def test_an_empty_filter_converts_the_head():
    with converted(config("--mxnorm.filter_fqns=")) as modules:
        assert type(modules["norm"]) is MXNorm and type(modules["output"]) is MXNormLinear
