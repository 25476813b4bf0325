"""Fields of a job config, and flags that set them."""

import sys
from pathlib import Path

import pytest
import tomli_w

from mxtrain.errors import ConfigError
from mxtrain.norms.row_norm import WHEN_COMPILED
from mxtrain.ops.hardware import MODES
from mxtrain.settings.known import known_fields
from mxtrain.settings.read import read_settings


def test_every_default_is_allowed():
    known = known_fields()
    for field in known.values():
        if field.name != "checkpoint.exclude_from_loading" or field.default:
            assert field.checked(field.default) == field.default


def test_choices_are_those_of_the_code():
    known = known_fields()
    assert known["mxnorm.mode"].choices == ("auto", *MODES)
    assert known["fused_norm.when_compiled"].choices == WHEN_COMPILED


PARTS = "parallelism.module_fqns_per_model_part"


@pytest.mark.parametrize(
    "flags, name, value",
    [
        ("--training.steps 7", "training.steps", 7),
        ("--training.steps=7", "training.steps", 7),
        ("--training.local-batch-size=7", "training.local_batch_size", 7),
        ("--training.steps 7 --training.steps 8", "training.steps", 8),
        ("--optimizer.lr 1e-3", "optimizer.lr", 1e-3),
        ("--optimizer.lr 1", "optimizer.lr", 1.0),
        ("--checkpoint.load_step -1", "checkpoint.load_step", -1),
        ("--checkpoint.enable", "checkpoint.enable", True),
        ("--checkpoint.enable=false", "checkpoint.enable", False),
        ("--checkpoint.no-enable", "checkpoint.enable", False),
        ("--metrics.no-enable_wandb", "metrics.enable_wandb", False),
        ("--model.converters=mxnorm,fused_norm", "model.converters", ["mxnorm", "fused_norm"]),
        ("--model.converters=", "model.converters", []),
        ("--debug.seed None", "debug.seed", None),
        ("--training.dataset_path None", "training.dataset_path", None),
        ("--job.description a=b", "job.description", "a=b"),
        ("--mxnorm.p 1", "mxnorm.p", 1),
        ("--mxnorm.recipes layers.0 bf16 wo nvfp4", "mxnorm.recipes", {"layers.0": "bf16", "wo": "nvfp4"}),
        ("--training.dataloader.num_workers 2", "training.dataloader.num_workers", 2),
        ("--quantize.grouped_mm.mx.fqns=a,b", "quantize.grouped_mm.mx.fqns", ["a", "b"]),
        (f"--{PARTS} a,b c", PARTS, [["a", "b"], ["c"]]),
        (f"--{PARTS} None", PARTS, None),
    ],
)
def test_flags(flags, name, value):
    settings = read_settings(flags.split())
    assert settings[name] == value and type(settings[name]) is type(value)
    assert list(settings.given) == [name]


def test_names_may_have_spaces_around_them():
    settings = read_settings(["--model.converters", " mxnorm, fused_norm, "])
    assert settings["model.converters"] == ["mxnorm", "fused_norm"]


def test_flags_override_the_file_and_the_rest_are_defaults(tmp_path):
    (tmp_path / "a.toml").write_text(tomli_w.dumps({"training": {"steps": 5, "dataloader": {"num_workers": 3}}}))
    settings = read_settings(["--job.config_file", str(tmp_path / "a.toml"), "--training.steps=6"])
    assert [settings[f"training.{name}"] for name in ("steps", "dataloader.num_workers", "seq_len")] == [6, 3, 2048]
    values = settings.values
    assert (values.training.steps, values.training.dataloader.num_workers, values.mxnorm.p) == (6, 3, 2)
    path = {"config_file": str(tmp_path / "a.toml")}
    assert settings.tables() == {"training": {"steps": 6, "dataloader": {"num_workers": 3}}, "job": path}


OWN = """
from dataclasses import dataclass, field
from pathlib import Path

@dataclass
class Mine:
    depth: int = 3
    numbers: list[int] = field(default_factory=list)
    pair: tuple[int, float] = (1, 2.0)
    words: set[str] = field(default_factory=set)
    path: Path = Path(".")
    table: dict[str, int] = field(default_factory=dict)

@dataclass
class JobConfig:
    mine: Mine = field(default_factory=Mine)
"""


@pytest.mark.parametrize(
    "name, in_toml, flag, value",
    [
        ("depth", 4, "4", 4),
        ("numbers", [1, 2], "1 2", [1, 2]),
        ("pair", [1, 2.5], "1 2.5", (1, 2.5)),
        ("words", ["a", "b"], "a b", {"a", "b"}),
        ("path", "a/b", "a/b", Path("a/b")),
        ("table", {"a": 1}, "a 1", {"a": 1}),
    ],
)
def test_sections_of_the_users_own(tmp_path, monkeypatch, name, in_toml, flag, value):
    (tmp_path / "my_sections.py").write_text(OWN)
    (tmp_path / "a.toml").write_text(tomli_w.dumps({"mine": {name: in_toml}}))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_sections", raising=False)
    own = "--job.custom_config_module=my_sections"
    assert read_settings([own, f"--mine.{name}", *flag.split()])[f"mine.{name}"] == value
    assert read_settings([own, f"--job.config_file={tmp_path / 'a.toml'}"])[f"mine.{name}"] == value


@pytest.mark.parametrize(
    "code, problem",
    [
        ("", " has no class JobConfig"),
        ("class JobConfig: pass", ": JobConfig is not a dataclass: write @dataclass above it"),
        ("from __future__ import annotations\n" + OWN.strip(), ": the type of JobConfig.mine is a string: remove"),
        (OWN.replace("int = 3", "int"), ": JobConfig.mine.depth has no default"),
    ],
)
def test_a_module_of_sections_that_cannot_be_used(tmp_path, monkeypatch, code, problem):
    (tmp_path / "my_sections.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_sections", raising=False)
    with pytest.raises(ConfigError) as error:
        read_settings(["--job.custom_config_module=my_sections"])
    assert str(error.value).startswith(f"job.custom_config_module = 'my_sections'{problem}")
