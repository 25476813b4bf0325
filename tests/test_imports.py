"""Imports point one way, folder by folder and file by file."""

import ast
import re
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
    {"launched", "launch", "ranks"},
    {"checkpoints"},
    {"config", "rng", "data"},
    {"formats"},
    {"settings"},
    {"analysis"},
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
METHOD = {"launch", "rng", "formats", "norms", "nn", "compile", "conversion", "parallel", "diagnostics"}
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


HAS_KERNELS, ORACLES = {"formats", "rng", "norms", "nn"}, {"mxnorm", "hadamard", "swiglu", "philox", "reference"}


def test_references_and_kernels_know_nothing_of_each_other():
    """One is the oracle of the other."""
    oracles = {module for module in FILES if module.rpartition(".")[2] in ORACLES and part(module) in HAS_KERNELS}
    oracles -= {"mxtrain.norms.mxnorm", "mxtrain.nn.mxnorm"}
    kernels = {module for module in FILES if any(name.split(".")[0] == "triton" for name in imported(module))}
    kernels = {module for module in kernels if part(module) in HAS_KERNELS}
    assert len(oracles) > 6 and len(kernels) > 8 and not oracles & kernels
    for module in oracles | kernels:
        assert not imported_modules(module) & (kernels if module in oracles else oracles), module
        assert module in oracles or not any(name.startswith("torchao") for name in imported(module)), module


def test_torchaos_prototype_names_are_imported_in_one_file():
    users = [module for module in FILES if any(n.startswith("torchao.prototype") for n in imported(module))]
    assert users == ["mxtrain.formats.mx.reference"]


def private_names(tree: ast.AST) -> set[str]:
    """Names of PyTorch with a part that begins with an underscore. The names of operations are the operations' own."""
    found = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    of_torch = {name for name in found if re.fullmatch(r"torch(\.(?!ops\.)\w+)+", name)}
    return {name for name in of_torch if re.search(r"\._(?!_)|\.FakeTensor", name)}


def test_private_names_of_pytorch_are_used_in_two_folders():
    for module, path in FILES.items():
        if part(module) not in ("launch", "compile"):
            assert not private_names(ast.parse(path.read_text())), module


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


NAMES = "mxfp|nvfp|e4m3|e5m2|e2m1"
MAY_NAME_FORMATS = ("mxtrain.formats", "mxtrain.cli", "mxtrain.settings.sections", "mxtrain.settings.titan")
"""The formats, and what declares and explains the settings"""


def words_of(tree: ast.AST) -> set[str]:
    """Identifiers and strings of a file, without docstrings."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    fields = ("id", "attr", "arg", "name", "asname", "module", "value")
    found = {getattr(node, field, None) for node in ast.walk(tree) if id(node) not in texts for field in fields}
    return {word for word in found if isinstance(word, str)}


def test_no_file_outside_of_formats_knows_one_by_name():
    for module, path in FILES.items():
        if not module.startswith(MAY_NAME_FORMATS):
            named = [word for word in words_of(ast.parse(path.read_text())) if re.search(NAMES, word, re.IGNORECASE)]
            assert not named, f"{module}: {named}"
