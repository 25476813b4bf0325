"""Imports point one way, folder by folder and file by file."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mxtrain"

# Lower layers first. A module may import from its own folder and from lower layers.
LAYERS = [
    {"errors"},
    {"files"},
    {"launched", "launch", "json_toml", "ranks"},
    {"run_folder"},
    {"checkpoints"},
    {"config", "recipes", "rng", "data"},
    {"settings"},
    {"analysis"},
    {"reports"},
    {"reference", "kernels"},
    {"ops"},
    {"norms"},
    {"nn"},
    {"compile"},
    {"conversion", "hugging_face", "parallel"},
    {"diagnostics"},
    {"titan"},
    {"cli"},
    {"train"},
    {""},  # mxtrain/__init__.py, which imports for type checkers only
]
METHOD = {"recipes", "rng", "reference", "kernels", "ops", "nn", "compile", "conversion", "parallel", "diagnostics"}
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def dotted(path: Path) -> str:
    return ".".join(("mxtrain", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


FILES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imported(module: str, in_functions: bool = True) -> frozenset[str]:
    """Dotted names of everything that a file imports, inside functions too, or when it is imported itself."""
    names, tree = set(), ast.parse(FILES[module].read_text())
    for node in ast.walk(tree) if in_functions else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def imported_modules(module: str, in_functions: bool = True) -> set[str]:
    """The files of mxtrain that a file imports."""
    found = set()
    for name in imported(module, in_functions):
        owner = name if name in FILES else name.rpartition(".")[0]
        if owner in FILES and owner != "mxtrain":
            found.add(owner)
    return found - {module}


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_part_of_the_package_has_a_layer():
    assert {part(module) for module in FILES} == RANK.keys()


def test_imports_point_one_way():
    for module in FILES:
        for other in imported_modules(module):
            if part(module) != part(other):
                assert RANK[part(other)] < RANK[part(module)], f"{module} imports {other}"


def test_no_files_import_each_other():
    # Raises CycleError, with the circle in its message.
    TopologicalSorter({module: imported_modules(module) for module in FILES}).prepare()


def test_only_titan_imports_torchtitan():
    for module in FILES:
        if part(module) != "titan":
            assert not any(name.split(".")[0] == "torchtitan" for name in imported(module)), module
        if part(module) in METHOD:
            assert "torchtitan." not in FILES[module].read_text(), f"{module} names a module of TorchTitan"


def test_reference_and_kernels_know_nothing_of_each_other():
    """One is the oracle of the other."""
    foreign = {"reference": ("triton", "kernels"), "kernels": ("torchao", "reference")}
    for module in FILES:
        for kind in foreign.keys() & {*module.split(".")}:
            assert not any({*foreign[kind]} & {*name.split(".")} for name in imported(module)), module


def test_torchaos_prototype_names_are_imported_in_one_file():
    users = [module for module in FILES if any(n.startswith("torchao.prototype") for n in imported(module))]
    assert users == ["mxtrain.reference.casts"]


def test_importing_mxtrain_or_its_command_line_does_not_import_torch():
    code = "import sys, mxtrain, mxtrain.cli, mxtrain.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_worker_imports_nothing_at_its_start_that_its_run_may_never_use():
    seen, waiting = set(), {"mxtrain.titan.train"}
    while waiting:
        seen.add(module := waiting.pop())
        packages = {name for name in FILES if module.startswith(f"{name}.")}
        waiting |= (imported_modules(module, in_functions=False) | packages) - seen
    assert {"mxtrain.titan", "mxtrain.checkpoints.checkpointer", "mxtrain.analysis.tables"} <= seen
    names = {name.split(".")[0] for module in seen for name in imported(module, in_functions=False)}
    assert "torchtitan" in names and not names & {"wandb", "matplotlib", "transformers"}
