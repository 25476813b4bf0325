"""The help: every setting once, mxtrain's first, with its values and its text."""

import re
import sys
from pathlib import Path

import pytest
import tomli
import tomli_w

from mxtrain import cli
from mxtrain.config import load_config, presets
from mxtrain.settings.fields import flat
from mxtrain.settings.help import settings_help
from mxtrain.settings.titan import known_fields, own_fields
from mxtrain.titan.releases import RELEASE
from tests.settings.test_fields import OWN


def named(text: str) -> list[str]:
    return re.findall(r"^  --(\w+(?:\.\w+)+)[ ,]?", text, flags=re.MULTILINE)


def test_every_setting_stands_once_with_its_text(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help-all"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.startswith("usage: mxtrain train [--verbose] CONFIG [FLAGS]\n")
    found, own = named(text), list(own_fields())
    assert found[: len(own)] == own and len(own) > 30 and sorted(found) == sorted(known_fields())
    for name in own:
        (entry,) = re.findall(rf"^  --{re.escape(name)}[ ,\n].*\n((?: {{8}}.*\n)+)", text, flags=re.MULTILINE)
        assert len(entry.partition("(default:")[0].split()) >= 4, name
    # TorchTitan's own text, also of classes inside classes
    assert "How often to collect profile traces" in text
    if RELEASE == "v02":  # 0.3 has another converter in its place
        assert re.search(r"--quantize.linear.float8.enable_fsdp_float8_all_gather.*\n +\w+", text)


def test_usual_settings_are_those_of_presets_and_of_the_documents_that_a_user_reads_first():
    root, known, settings = Path(__file__).parents[2], known_fields(), own_fields()
    page = "".join((root / name).read_text() for name in ("README.md", "train_configs/CHOOSING.md"))
    snippets = re.findall(r"^```toml\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    tables = [tomli.loads(text) for text in snippets] + [load_config(path) for path in presets().values()]
    documented = {name for name in known if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", page)}
    documented |= {f"mxnorm.{name}" for name in re.findall(r"`(\w+) = ", page)} & settings.keys()
    documented |= {name for table in tables for name, _ in flat(table, known)}
    shown = named(settings_help(["--help"]))
    assert documented - {"extends"} <= set(shown) and len(documented) > 40
    assert len(shown) < 70 < len(named(settings_help(["--help-all"])))
    assert "training.gc_freq" not in shown and "training.gc_freq" in named(settings_help(["--training.gc_freq=9"]))


def test_values_of_a_config_of_flags_and_of_the_users_own_section(tmp_path, monkeypatch):
    (tmp_path / "my_help.py").write_text(OWN.replace("depth: int = 3", 'depth: int = 3\n    """How deep it is"""'))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_help", raising=False)
    (tmp_path / "a.toml").write_text(tomli_w.dumps({"extends": "llama3_debug", "training": {"steps": 7}}))
    flags = ["--mxnorm.p=1", "--job.custom_config_module=my_help", "--help"]
    text = settings_help([f"--job.config_file={tmp_path / 'a.toml'}", *flags])
    assert re.search(r"\[mine\]\n  --mine.depth INTEGER\n +How deep it is \(default: 3\)", text)
    assert text.index("--mine.depth") < text.index("Settings of TorchTitan")
    text = " ".join(text.split())
    assert "1 or 2 (set to 1; default: 2) --mxnorm.recipe" in text
    assert re.search(r"--training.steps INTEGER [^()-]* \(set to 7; default: 10000\)", text)
    assert "--checkpoint.enable, --checkpoint.no_enable Whether" in text
