"""The documents: their commands parse, their snippets run, their links resolve, and their tables are complete."""

import ast
import importlib
import re
import shlex
from collections import Counter
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import tomli
import torch
import torch.nn as nn
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

import mxtrain
from mxtrain import cli
from mxtrain.cli import compare_command
from mxtrain.config import presets
from mxtrain.settings.help import with_tables
from mxtrain.settings.titan import own_fields
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.releases import RELEASE

ROOT = Path(__file__).parents[1]
SETTINGS, CODE = "train_configs/README.md", "mxtrain/README.md"
DOCUMENTS = {
    name: (ROOT / name).read_text()
    for name in (
        "README.md",
        SETTINGS,
        "train_configs/RUNS.md",
        "train_configs/TROUBLESHOOTING.md",
        "train_configs/MODELS.md",
        "train_configs/CUSTOM.md",
        "train_configs/LAYOUTS.md",
        "train_configs/TITAN03.md",
        "train_configs/NUMERICS.md",
        "train_configs/FIRST_HOUR.md",
        CODE,
        "scripts/bench/README.md",
        "scripts/evidence/README.md",
        "scripts/faults/README.md",
        "scripts/examples/README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    )
}
BENCHMARKS = ROOT / "scripts" / "bench"


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands_in(text: str) -> list[list[str]]:
    """Return the shell commands of a document as words, without comments and variables before the command."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").replace("&&", "\n").splitlines()
    lines += re.findall(r"^\| `(mxtrain .*?)` \|", text, flags=re.MULTILINE)  # a table of commands
    split = (shlex.split(line, comments=True) for line in lines)
    return [
        words[next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :] for words in split if words
    ]


def usage_lines(script: Path) -> list[list[str]]:
    """Return the commands in the docstring of a benchmark as words."""
    lines = (line.strip() for line in ast.get_docstring(ast.parse(script.read_text())).splitlines())
    found = (re.sub(r"^(\w+=\S+ )*", "", line) for line in lines)
    return [shlex.split(re.split(r" {2,}", line)[0]) for line in found if line.startswith("python scripts/bench/")]


def prose(text: str) -> str:
    """Return a document without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


# Commands


def check_config(words: list[str]) -> None:
    """Parse a config and flags as training does."""
    parse_job_config(["--job.config_file", *words])


def check_mxtrain(words: list[str]) -> None:
    options = cli._parser().parse_args(words)
    if words[0] == "compare":
        options, variants, flags = compare_command.separated(options)
        assert options.table or compare_command.read_all(compare_command.planned(variants, 1, [], flags))
    elif getattr(options, "resume", None):
        parse_job_config(options.resume[1:])  # the run's own config is not here
    elif "config" in options:
        check_config([options.config, *options.flags])


def check_torchrun(words: list[str]) -> None:
    options = get_args_parser().parse_args(words)
    first, _, *flags = options.training_script_args
    assert options.module and options.training_script == "mxtrain.train"
    assert first in ("--job.config_file", "--resume")
    parse_job_config(flags if first == "--resume" else options.training_script_args)


def check_matrix(words: list[str]) -> None:
    assert all(re.fullmatch(r"\d+\.\d+|newest|~/\S+", release) for release in words), words


def check_pytest(words: list[str]) -> None:
    markers = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    for option, word in zip([""] + words, words):
        known = word in [marker.partition(":")[0] for marker in markers] if option == "-m" else (ROOT / word).exists()
        assert known or word in ("-x", "-m"), word


def check_pip(words: list[str]) -> None:
    extras = re.fullmatch(r"\.\[([\w,]+)\]", words[-1])[1].split(",")
    assert words[:2] == ["install", "-e"]
    assert set(extras) <= set(tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def check_python(words: list[str]) -> None:
    """Parse the options of a script: it prints its help only after valid options."""
    script, *options = words
    assert script.startswith(("scripts/bench/", "scripts/faults/", "scripts/examples/"))
    benchmark = importlib.import_module(Path(script).stem)
    assert Path(benchmark.__file__) == ROOT / script
    with pytest.raises(SystemExit) as end:
        benchmark.main([*options, "--help"])
    assert end.value.code == 0


def check_sbatch(words: list[str]) -> None:
    script = next(number for number, word in enumerate(words) if not word.startswith("--"))
    assert words[script] == "train.sbatch" and (ROOT / "train_configs" / words[script]).exists()
    check_config(words[script + 1 :])


def check_docker(words: list[str]) -> None:
    """Parse what runs in the image; a build names the Dockerfile."""
    if words[0] == "build":
        assert words[-1] == "." and (ROOT / words[words.index("-f") + 1]).exists()
    else:
        check_mxtrain(words[words.index("mxtrain") + 1 :])


CHECKS = {
    "docker": check_docker,
    "sbatch": check_sbatch,
    "mxtrain": check_mxtrain,
    "torchrun": check_torchrun,
    "python": check_python,
    "pip": check_pip,
    "./scripts/train.sh": check_config,
    "scripts/train.sh": check_config,
    "./scripts/test.sh": check_pytest,
    "scripts/test.sh": check_pytest,
    ".ci/run": check_pytest,
    ".ci/matrix": check_matrix,
    "ruff": lambda words: None,
}


@pytest.mark.parametrize("document", [name for name, text in DOCUMENTS.items() if commands_in(text)])
def test_commands(document, monkeypatch, capsys):
    if document == "scripts/evidence/README.md" and RELEASE != "v02":
        pytest.skip("its ablations are for TorchTitan 0.2.2")
    monkeypatch.chdir(ROOT)
    for program, *words in commands_in(DOCUMENTS[document]):
        assert program in CHECKS, program
        if "/" in program:
            assert (ROOT / program).stat().st_mode & 0o111, f"{program} is not executable"
        capsys.readouterr()
        CHECKS[program](words)
        if program == "python":
            known = re.findall(r"--[\w-]+", capsys.readouterr().out)
            assert {word for word in words if word.startswith("--")} <= set(known), words


def test_usage_lines_of_the_benchmarks(monkeypatch, capsys):
    seen = set()
    for script in sorted(BENCHMARKS.glob("*.py")):
        for _, *words in usage_lines(script):
            assert ROOT / words[0] == script
            check_python(words)
            assert {w for w in words if w.startswith("--")} <= set(re.findall(r"--[\w-]+", capsys.readouterr().out))
            seen.add(script.stem)
    assert seen == {script.stem for script in BENCHMARKS.glob("*.py") if "\ndef main(" in script.read_text()}
    document = DOCUMENTS["scripts/bench/README.md"]
    assert seen <= set(re.findall(r"^\| `(\w+)\.py` \|", document, flags=re.MULTILINE))
    assert {script.stem for script in BENCHMARKS.glob("*.py")} <= set(re.findall(r"`(\w+)\.py`", document))


# Snippets


def test_python_in_the_readme_runs():
    model = nn.Sequential(nn.Embedding(64, 32))
    model.norm, model.proj, model.lm_head = nn.RMSNorm(32), nn.Linear(32, 64), nn.Linear(64, 8)
    names = {
        "model": model,
        "x": torch.randn(4, 32).bfloat16(),
        "r": torch.randn(4, 32).bfloat16(),
        "weight": torch.ones(32).bfloat16(),
        "gate": torch.randn(8, 32).bfloat16(),
        "bias": torch.zeros(8),
    }
    (code,) = blocks(DOCUMENTS["README.md"], "python")
    exec(code, names)
    assert {type(module) for module in model.modules()} > {mxtrain.MXNorm, mxtrain.MXNormLinear}
    assert type(model.lm_head) is nn.Linear
    dtypes = [names[name].dtype for name in ("codes", "scales", "rho", "logits")]
    assert dtypes == [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32, torch.float32]
    assert names["y"].shape == names["total"].shape == (4, 32)
    torch.testing.assert_close(names["probs"].float().sum(1), torch.ones(4), atol=0.02, rtol=0)


@pytest.mark.parametrize("document", ["README.md", SETTINGS])
def test_toml_snippets_parse(document, tmp_path):
    found = blocks(DOCUMENTS[document], "toml")
    assert found
    for snippet in found:
        config = tomli.loads(snippet)
        base = ROOT / "train_configs" / config.get("extends", "llama3_debug.toml")
        snippet = re.sub(r"^extends = .*", "", snippet, flags=re.MULTILINE)
        path = tmp_path / "config.toml"
        path.write_text(f'extends = "{base}"\n{snippet}')
        job_config = parse_job_config(["--job.config_file", str(path)])
        for section in config.keys() - {"extends"}:
            for name, value in config[section].items():
                read = getattr(getattr(job_config, section), name)
                if is_dataclass(read):
                    assert {key: getattr(read, key) for key in value} == value
                else:
                    assert read == value


# Tables


def test_a_fresh_machine_needs_two_commands():
    """One trains, the other passes the tests, as continuous integration does."""
    first = DOCUMENTS["README.md"].partition("\n## Commands\n")[0]
    assert commands_in(first) == [["./scripts/train.sh", "train_configs/llama3_debug.toml"], ["./scripts/test.sh"]]
    assert re.search(r"^\./scripts/test\.sh *(#|$)", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer," in first
    for extra in ("titan02", "titan03"):
        titan, torch = (Requirement(text).specifier for text in project["optional-dependencies"][extra])
        (row,) = (line for line in first.splitlines() if f".[{extra}]" in line)
        _, (release, *_), torches, *_ = (re.findall(r"\d+\.[\d.]*\d", cell) for cell in row.split("|"))
        above = re.sub(r"\d+$", lambda minor: str(int(minor[0]) + 1), torches[-1])
        assert titan.contains(release) and all(map(torch.contains, torches)) and not torch.contains(above)


def test_the_first_run_of_the_table_has_the_checkpoints_that_the_others_read():
    first, resumed, *_ = (words for words in commands_in(DOCUMENTS["README.md"]) if words[0] == "mxtrain")
    job_config = parse_job_config(["--job.config_file", *first[2:]])
    assert job_config.checkpoint.enable and resumed[3] == job_config.job.dump_folder


def test_the_speeds_are_those_of_the_benchmarks():
    benchmarks = DOCUMENTS["scripts/bench/README.md"]
    merged = benchmarks.partition("| MXFP8, `fp8_merged` |")[2]
    merged = re.findall(r"^\| .*? \| [\d,]+ \| [\d.]+ \| ([\d.]+) ", merged, flags=re.MULTILINE)
    steps = benchmarks.partition("| bf16, graph passes | MXNorm p = 2 |")[2]
    rows = re.findall(r"^\| .*? \| [\d,]+ \| ([\d,]+) \(.*?\) \| ([\d,]+) ", steps, flags=re.MULTILINE)
    speeds = [f"{int(ours.replace(',', '')) / int(bf16.replace(',', '')):.2f}" for bf16, ours in rows[:3]]
    table = DOCUMENTS["README.md"].partition("| MXFP8, one H200 |")[2]
    shown = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) \|$", table, flags=re.MULTILINE)
    assert shown == [(f"{float(one):.2f}", other) for one, other in zip(merged, speeds, strict=True)]


def test_names_in_profiles_are_those_of_the_code():
    """Functions and operations as PyTorch's profiler shows them on a CPU, and the kernels of Triton."""
    from torch.profiler import ProfilerActivity, profile

    (table,) = re.findall(r"^\| name \| what it is \|\n(.*?)\n\n", DOCUMENTS["train_configs/RUNS.md"], re.M | re.S)
    names = set(re.findall(r"`(_\w+)`", table))
    functions = {name for name in names if name.endswith("Function")}
    sources = "".join(path.read_text() for path in (ROOT / "mxtrain").rglob("*.py"))
    assert len(names - functions) == 8 and names - functions <= set(re.findall(r"^def (\w+_kernel)\(", sources, re.M))
    model = nn.Sequential()
    model.norm, model.proj, model.other = nn.RMSNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
    mxtrain.convert(model, example_inputs=(torch.randn(32, 32),), mode="emulated", filter_fqns=[])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(torch.randn(32, 32, requires_grad=True)).sum().backward()
    shown = {event.key for event in profiled.key_averages()}
    assert functions | {f"{name}Backward" for name in functions} <= shown
    operations = {f"mxtrain::{name.removeprefix('_').removesuffix('_kernel')}" for name in names - functions}
    assert {"mxtrain::cast", "mxtrain::mxnorm_cast", "mxtrain::norm_backward"} <= shown & operations


def test_troubleshooting_quotes_the_messages_of_the_code():
    sources = "".join(path.read_text() for path in (ROOT / "mxtrain").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message on several lines
    quotes = re.findall(r"^\| [^|]*?`(.*?)`.* \|$", DOCUMENTS["train_configs/TROUBLESHOOTING.md"], flags=re.MULTILINE)
    parts = [[part.strip(" ,:") for part in quote.split("...") if part.count(" ") > 2] for quote in quotes]
    assert len(parts) > 10 and all(parts)
    assert [part for found in parts for part in found if part not in sources] == []


def test_settings_name_every_field():
    found = Counter(re.findall(r"^`([\w.]+)`[*†]? \| ", DOCUMENTS[SETTINGS], flags=re.MULTILINE))
    assert found == Counter(list(own_fields()))


def test_settings_name_every_converter_and_file():
    cells = re.findall(r"^\| (`\w.*?) \|.*\|(.*)\|$", DOCUMENTS[SETTINGS], flags=re.MULTILINE)
    files = [name + variant for first, last in cells for name in re.findall(r"`(\w+)\.toml`", first)
             for variant in ("", *re.findall(r"`(_\w+)`", last))]  # fmt: skip
    assert sorted(files) == sorted(presets())
    converters = re.findall(r"^\| `(\w+)` \|", DOCUMENTS[SETTINGS], flags=re.MULTILINE)
    assert converters == ["mxnorm", "mx_linear", "fused_norm", "decompose_k_router"]


def test_the_tables_of_settings_are_made_from_their_declarations():
    assert with_tables(DOCUMENTS[SETTINGS]) == DOCUMENTS[SETTINGS], "run: python -m mxtrain.settings.help"


def test_the_guide_names_every_part_of_the_package():
    named = re.findall(r"`(\w+)(?:/|\.py)`", DOCUMENTS[CODE])
    parts = {
        path.stem for path in (ROOT / "mxtrain").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - {"__init__"} <= set(named)


def test_versions_agree():
    version = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## {version}\n" in DOCUMENTS["CHANGELOG.md"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


# Links and sentences


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", list(DOCUMENTS))
def test_links_and_paths_resolve(document):
    text, folder = prose(DOCUMENTS[document]), (ROOT / document).parent
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        assert not path or (folder / path).exists(), target
        if anchor:
            assert anchor in anchors((folder / path).read_text() if path else text), target
    for path in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|toml|sh|md))`", text):
        if document == "CHANGELOG.md":
            continue  # names files of earlier versions, too
        assert (ROOT / path).exists() or (folder / path).exists(), path


def test_no_sentence_stands_twice():
    sentences = Counter()
    for text in DOCUMENTS.values():
        text = re.sub(r"^[|#!].*$", "", prose(text), flags=re.MULTILINE)
        paragraphs = (
            " ".join(paragraph.split()) for paragraph in re.split(r"\n\n|^- |^\d+\. ", text, flags=re.MULTILINE)
        )
        sentences.update(sentence for p in paragraphs for sentence in re.split(r"(?<=[.:]) ", p) if len(sentence) > 40)
    assert [sentence for sentence, count in sentences.items() if count > 1] == []


def test_a_reader_gets_through_all_documents():
    folders = (".", "mxtrain", "scripts/*", "train_configs")
    texts = [path.read_text() for folder in folders for path in ROOT.glob(f"{folder}/*.md")]
    words = sum(1 for text in texts for word in text.split() if re.search(r"\w", word))  # without the bars of tables
    assert len(texts) > len(DOCUMENTS) and words <= 16_000
