"""Fields of a job config, and flags that set them."""

import sys
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest
import tomli_w

from mxtrain.errors import ConfigError
from mxtrain.formats.hardware import MODES
from mxtrain.norms.row_norm import WHEN_COMPILED
from mxtrain.settings.fields import fields_of
from mxtrain.settings.read import read_settings
from mxtrain.settings.releases import release
from mxtrain.settings.titan import NARROWER, RULES, known_fields, titan_fields


def test_every_default_is_allowed():
    known = known_fields()
    for field in known.values():
        assert field.checked(field.default) == field.default
    assert known["mxnorm.mode"].choices == ("auto", *MODES)
    assert known["fused_norm.when_compiled"].choices == WHEN_COMPILED


def test_what_is_said_about_torchtitans_settings_is_about_settings_that_exist():
    names = {f"{name}." for name in (*titan_fields(), *release().gone)}
    for said in " ".join([*RULES.values(), *NARROWER.values()]).split():
        assert any(name.startswith(f"{said}.") or f"{said}.".startswith(name) for name in names), said


def test_the_source_of_torchtitan_is_read_as_python_reads_it():
    titan, known = release(), titan_fields()
    for section, place in titan.classes.items():
        file, *names = place.split()
        module = import_module(f"torchtitan.{file.removesuffix('.py').replace('/', '.')}")
        for kind in (reduce(getattr, name.split("."), module) for name in names):
            left_out = {f"{section}.{name}" for name in titan.new.get(section, "").split()}
            for name, field in fields_of(kind, section).items():
                if name.rpartition(".")[2] not in kind.__annotations__ and section or name in left_out:
                    continue  # declared by another class
                same = (known[name].doc, known[name].default) == (field.doc, titan.defaults.get(name, field.default))
                assert same and (name in " ".join(NARROWER.values()).split() or known[name].type == field.type), name


PARTS = "parallelism.module_fqns_per_model_part"
FLAGS = [
    ("--training.steps 7 --training.steps=8", "training.steps", 8),
    ("--training.local-batch-size=7", "training.local_batch_size", 7),
    ("--optimizer.lr 1", "optimizer.lr", 1.0),
    ("--checkpoint.load_step -1", "checkpoint.load_step", -1),
    ("--checkpoint.enable", "checkpoint.enable", True),
    ("--checkpoint.enable=false", "checkpoint.enable", False),
    ("--metrics.no-enable_wandb", "metrics.enable_wandb", False),
    ("--model.converters mxnorm,fused_norm,", "model.converters", ["mxnorm", "fused_norm"]),
    ("--model.converters=", "model.converters", []),
    ("--debug.seed None", "debug.seed", None),
    ("--job.description a=b", "job.description", "a=b"),
    ("--mxnorm.p 1", "mxnorm.p", 1),
    ("--mxnorm.recipes layers.0 bf16 wo nvfp4", "mxnorm.recipes", {"layers.0": "bf16", "wo": "nvfp4"}),
    ("--training.dataloader.num_workers 2", "training.dataloader.num_workers", 2),
    (f"--{PARTS} a,b c", PARTS, [["a", "b"], ["c"]]),
    (f"--{PARTS} None", PARTS, None),
]


def test_flags():
    for flags, name, value in FLAGS:
        settings = read_settings(flags.split())
        assert settings[name] == value and type(settings[name]) is type(value), flags
        assert list(settings.given) == [name]
    assert read_settings(["--model.converters", " mxnorm, fused_norm, "])["model.converters"] == [
        "mxnorm",
        "fused_norm",
    ]
    older = read_settings(["--model.tokenizer_path=a"])
    assert older["model.hf_assets_path"] == "a"


def test_flags_override_the_file_and_the_rest_are_defaults(tmp_path):
    (tmp_path / "a.toml").write_text(tomli_w.dumps({"training": {"steps": 5, "dataloader": {"num_workers": 3}}}))
    settings = read_settings(["--job.config_file", str(tmp_path / "a.toml"), "--training.steps=6"])
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
    pair: tuple[int, float] = (1, 2.0)
    words: set[str] = field(default_factory=set)
    path: Path = Path(".")
    table: dict[str, int] = field(default_factory=dict)

@dataclass
class JobConfig:
    mine: Mine = field(default_factory=Mine)
"""


def test_sections_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "my_sections.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_sections", raising=False)
    own = "--job.custom_config_module=my_sections"
    for name, in_toml, flag, value in (
        ("depth", 4, "4", 4),
        ("pair", [1, 2.5], "1 2.5", (1, 2.5)),
        ("words", ["a", "b"], "a b", {"a", "b"}),
        ("path", "a/b", "a/b", Path("a/b")),
        ("table", {"a": 1}, "a 1", {"a": 1}),
    ):
        (tmp_path / "a.toml").write_text(tomli_w.dumps({"mine": {name: in_toml}}))
        assert read_settings([own, f"--mine.{name}", *flag.split()])[f"mine.{name}"] == value
        assert read_settings([own, f"--job.config_file={tmp_path / 'a.toml'}"])[f"mine.{name}"] == value


@pytest.mark.parametrize(
    "code, problem",
    [
        ("", "job.custom_config_module = .my_sections. has no class JobConfig"),
        (
            "class JobConfig: pass",
            "job.custom_config_module = 'my_sections' has no class JobConfig that is a dataclass",
        ),
        (OWN.replace("int = 3", "int"), "Mine.depth in .*my_sections.py has no default"),
    ],
)
def test_a_module_of_sections_that_cannot_be_used(tmp_path, monkeypatch, code, problem):
    (tmp_path / "my_sections.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_sections", raising=False)
    with pytest.raises(ConfigError, match=problem):
        read_settings(["--job.custom_config_module=my_sections"])
