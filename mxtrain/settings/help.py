"""What users read about settings: ``--help``, and the tables of train_configs/README.md.

``python -m mxtrain.settings.help`` writes the tables anew.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path

from mxtrain.settings import sections
from mxtrain.settings.fields import Settings, fields_of
from mxtrain.settings.known import known_fields, own_fields
from mxtrain.settings.model_settings import PLACES, SECTION
from mxtrain.settings.read import HELP_FLAGS, OWN_MODULE, read_settings
from mxtrain.settings.types import Resume

WIDTH = 100
INDENT = " " * 8
README = Path(__file__).parents[2] / "train_configs" / "README.md"


def settings_help(arguments: list[str]) -> str:
    """Return the help of every setting, mxtrain's first, with the values that a config file and flags give.

    Args:
        arguments: TorchTitan's flags, with ``--job.config_file`` and ``--help`` among them; empty for the defaults.

    Raises:
        ConfigError: for a mistake in the settings.
    """
    given = [word for word in arguments if word not in HELP_FLAGS]
    settings = read_settings(given) if given else Settings(known_fields(), {})
    first, docs = list(own_fields()), _titan_docs() | own_docs()
    module = sys.modules.get(settings["job.custom_config_module"])
    if module is not None and module.__name__ != OWN_MODULE:  # a user's
        first += fields_of(module.JobConfig)
        docs |= _docs_of(module.JobConfig)
    lines = [
        "In a TOML file, --section.name VALUE is the line 'name = VALUE' below [section].",
        "'mxtrain train CONFIG --help' shows the values of a config.",
    ]
    rest = [name for name in settings.known if name not in first]
    for title, names in (("Settings of mxtrain", first), ("Settings of TorchTitan", rest)):
        lines += ["", title, "=" * len(title), *_entries(names, settings, docs)]
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return the text of train_configs/README.md with every table between its two marks made from the declarations."""
    docs, known = own_docs(), own_fields()
    signs = {Resume.FREE: "*", Resume.DATA: "†"}

    def table(mark: re.Match) -> str:
        rows = [
            f"`{name}`{signs.get(field.resume, '')} | "
            f"{'unset' if field.default is None else f'`{json.dumps(field.default)}`'} | {' '.join(docs[name].split())}"
            for name, field in known.items()
            if name.rpartition(".")[0] in mark[2].split()
        ]
        return "\n".join([mark[1], "setting | default | meaning", "---|---|---", *rows, "", mark[3]])

    return re.sub(r"(<!-- settings: (.*?) -->)\n.*?(<!-- end -->)", table, page, flags=re.DOTALL)


def own_docs() -> dict[str, str]:
    """Return full name -> text of every setting that mxtrain declares; first the models that have it, if not all do."""
    docs = _docs_of(sections.JobConfig)
    for name in sections.ModelArgs.__annotations__:
        models = [model for model, places in PLACES.items() if name in places]
        if len(models) < len(PLACES):
            docs[f"{SECTION}.{name}"] = f"{', '.join(models)}: {docs[f'{SECTION}.{name}']}"
    return docs


def _titan_docs() -> dict[str, str]:
    """Return full name -> text of TorchTitan's settings."""
    if version("torchtitan").startswith("0.2."):
        from torchtitan.config import JobConfig

        return _docs_of(JobConfig)
    from torchtitan.components import checkpointer, metrics, optimizer, validate
    from torchtitan.config import configs
    from torchtitan.tools import profiler

    kinds = {
        "profiling": profiler.Profiler.Config,
        "metrics": metrics.MetricsProcessor.Config,
        "lr_scheduler": optimizer.LRSchedulersContainer.Config,
        "training": configs.TrainingConfig,
        "parallelism": configs.ParallelismConfig,
        "checkpoint": checkpointer.CheckpointManager.Config,
        "compile": configs.CompileConfig,
        "comm": configs.CommConfig,
        "validation": validate.Validator.Config,
        "debug": configs.DebugConfig,
    }
    docs = {}
    for section, config in kinds.items():
        for kind in reversed(config.__mro__):
            docs |= _docs_of(kind, f"{section}.") if is_dataclass(kind) else {}
    return docs


def _entries(names: list[str], settings: Settings, docs: dict[str, str]) -> Iterator[str]:
    section = None
    for name in names:
        if name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            yield from ("", f"[{section}]")
        field = settings.known[name]
        yield f"  {', '.join(field.flags)} {field.placeholder}".rstrip()
        text = " ".join(docs.get(name, "").split())
        state = f"set to {settings[name]!r}; " if settings.changed(name) else ""
        text = f"{text} ({state}default: {field.default!r})".strip()
        yield textwrap.fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


def _docs_of(job_config: type, section: str = "") -> dict[str, str]:
    """Return full name -> the string under each field, from the source of the dataclasses."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(job_config))).body
    docs = {}
    for node, below in zip(tree.body, tree.body[1:]):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[f"{section}{node.target.id}"] = str(below.value.value)
    for f in fields(job_config):
        if is_dataclass(f.type):
            docs |= _docs_of(f.type, f"{section}{f.name}.")
    return docs


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
