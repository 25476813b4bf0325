"""What users read about settings: ``--help``, and the tables of train_configs/README.md.

``python -m mxtrain.settings.help`` writes the tables anew.
"""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from mxtrain.config import load_config, presets
from mxtrain.settings.fields import Field, Settings, flat
from mxtrain.settings.model_settings import PLACES, SECTION
from mxtrain.settings.read import HELP_ALL, HELP_FLAGS, read_settings
from mxtrain.settings.titan import known_fields, own_fields, titan_fields
from mxtrain.settings.types import Resume

WIDTH = 100
INDENT = " " * 8
README = Path(__file__).parents[2] / "train_configs" / "README.md"
BESIDE_PRESETS = """
    job.dump_folder checkpoint.may_change debug.deterministic model.hf_assets_path training.dataset_path
    training.global_batch_size mxnorm.filter_fqns mxnorm.estimator mxnorm.backward mxnorm.mode mxnorm.merge_limit
    mxnorm.diagnostics.every
"""
"""Settings that ``--help`` shows although no preset sets them, among them those of README.md and CHOOSING.md"""


def settings_help(arguments: list[str]) -> str:
    """Return the help of settings, mxtrain's first, with the values that a config file and flags give.

    It has the settings of presets, of ``BESIDE_PRESETS``, of the user's own module, and every setting with a value
    other than the default; with ``--help-all``, every setting.

    Args:
        arguments: TorchTitan's flags, with ``--job.config_file`` and a help flag among them; without a config and
            other flags, values are the defaults.
    """
    given = [word for word in arguments if word not in HELP_FLAGS]
    settings = read_settings(given) if given else Settings(known_fields(), {})
    own = own_fields()
    theirs = [name for name in titan_fields() if name not in own]
    users = [name for name in settings.known if name not in own and name not in theirs]
    shown = {*users, *BESIDE_PRESETS.split(), *filter(settings.changed, settings.known)}
    shown |= {name for preset in presets().values() for name, _ in flat(load_config(preset), settings.known)}
    lines = [
        "In a TOML file, --section.name VALUE is the line 'name = VALUE' below [section].",
        "'mxtrain train CONFIG --help' shows the values of a config.",
    ]
    if HELP_ALL in arguments:
        shown = set(settings.known)
    else:
        lines.append(f"'mxtrain train {HELP_ALL}' shows all {len(settings.known)} settings; these are the usual ones.")
    for title, names in (("Settings of mxtrain", [*own, *users]), ("Settings of TorchTitan", theirs)):
        lines += ["", title, "=" * len(title), *_entries([name for name in names if name in shown], settings)]
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return the text of train_configs/README.md with every table between its two marks made from the declarations."""
    signs = {Resume.FREE: "*", Resume.DATA: "†"}

    def table(mark: re.Match) -> str:
        rows = [
            f"`{name}`{signs.get(field.resume, '')} | "
            f"{'unset' if field.default is None else f'`{json.dumps(field.default)}`'} | {_text(field)}"
            for name, field in own_fields().items()
            if name.rpartition(".")[0] in mark[2].split()
        ]
        return "\n".join([mark[1], "setting | default | meaning", "---|---|---", *rows, "", mark[3]])

    return re.sub(r"(<!-- settings: (.*?) -->)\n.*?(<!-- end -->)", table, page, flags=re.DOTALL)


def _text(field: Field) -> str:
    """What a setting does; for a size of a model, first the models that have it, if not all do."""
    section, _, last = field.name.rpartition(".")
    models = [model for model, places in PLACES.items() if section == SECTION and last in places]
    return f"{', '.join(models)}: {field.doc}" if 0 < len(models) < len(PLACES) else field.doc


def _entries(names: Iterable[str], settings: Settings) -> Iterator[str]:
    section = None
    for name in names:
        if name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            yield from ("", f"[{section}]")
        field = settings.known[name]
        yield f"  {', '.join(field.flags)} {field.placeholder}".rstrip()
        state = f"set to {settings[name]!r}; " if settings.changed(name) else ""
        text = f"{_text(field)} ({state}default: {field.default!r})".strip()
        yield textwrap.fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
