"""The help of all settings: mxtrain's first, then the rest of TorchTitan's. Made without importing PyTorch."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from mxtrain.settings import sections
from mxtrain.settings.fields import fields_of
from mxtrain.settings.read import HELP_FLAGS, OWN_MODULE, known_fields, read_settings
from mxtrain.settings.titan_fields import job_config_source, titan_job_config
from mxtrain.settings.values import Settings

WIDTH = 100
INDENT = " " * 8


def settings_help(arguments: list[str]) -> str:
    """Return the help of every setting, with the values that a config file and flags give.

    Args:
        arguments: TorchTitan's flags, with ``--job.config_file`` and ``--help`` among them; empty for the defaults.

    Raises:
        ConfigError: for a mistake in the settings.
    """
    given = [word for word in arguments if word not in HELP_FLAGS]
    settings = read_settings(given) if given else Settings(known_fields(), {})
    docs = _docs_of(titan_job_config(), job_config_source().read_text(encoding="utf-8"))
    docs |= _docs_of(sections.JobConfig, inspect.getsource(sections))
    own = dict(fields_of(sections.JobConfig))
    module = sys.modules.get(settings["job.custom_config_module"])
    if module is not None and module.__name__ != OWN_MODULE:  # a user's
        docs |= _docs_of(module.JobConfig, inspect.getsource(module))
        own |= fields_of(module.JobConfig)
    first = [name for name in own if name in settings.known]
    rest = [name for name in settings.known if name not in own]
    lines = [
        "In a TOML file, --section.name VALUE is the line 'name = VALUE' below [section].",
        "'mxtrain train CONFIG --help' shows the values of a config.",
    ]
    for title, names in (("Settings of mxtrain", first), ("Settings of TorchTitan", rest)):
        lines += ["", title, "=" * len(title), *_tables(names, settings, docs)]
    return "\n".join(lines)


def _tables(names: list[str], settings: Settings, docs: dict[str, str]) -> Iterator[str]:
    section = None
    for name in names:
        if name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            yield from ("", f"[{section}]")
        field = settings.known[name]
        yield f"  {', '.join(field.flags)}{'' if field.is_switch else ' ' + field.placeholder}"
        text = " ".join(docs.get(name, "").split())
        state = f"(default: {field.default!r})"
        if settings[name] != field.default:
            state = f"(set to {settings[name]!r}; default: {field.default!r})"
        yield textwrap.fill(f"{text} {state}".strip(), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


def _docs_of(job_config: type, source: str) -> dict[str, str]:
    """Return full name -> the string under each field, from the source of the file with the dataclasses."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return dict(_named_docs(job_config, classes, ""))


def _named_docs(job_config: type, classes: dict[str, ast.ClassDef], section: str) -> Iterator[tuple[str, str]]:
    body = classes[job_config.__name__].body if job_config.__name__ in classes else []
    for node, below in zip(body, body[1:]):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield f"{section}{node.target.id}", str(below.value.value)
    for f in fields(job_config):
        if is_dataclass(f.type):
            # A class inside a class, such as Quantize's, is looked up there.
            inner = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
            yield from _named_docs(f.type, classes | inner, f"{section}{f.name}.")
