"""Imports point one way.

formats <- recipe <- reference, kernels <- quantize <- gemm, normalize, matmul <- nn <- conversion <- titan <- cli
"""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mxtrain"

# Lower layers first; a module may import from its own layer and those before it.
LAYERS = [
    {"errors", "formats", "config", "cache", "seeds"},
    {"recipe", "hardware", "rounding", "data", "analysis"},
    {"reference", "kernels"},
    {"quantize", "nvfp4_operands"},
    {"gemm", "normalize", "matmul", "inductor"},
    {"nn"},
    {"norm_uses", "rms_norms", "routers", "selection"},
    {"conversion"},
    {"titan"},
    {"train", "launch", "doctor"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part != "__init__":
            yield path, part


def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_part_of_the_package_has_a_layer():
    assert {part for _, part in modules()} <= RANK.keys()


def test_imports_point_one_way():
    for path, part in modules():
        for name in imported(path):
            top, _, rest = name.partition(".")
            if top == "mxtrain" and rest.split(".")[0] in RANK:
                assert RANK[rest.split(".")[0]] <= RANK[part], f"{path} imports {name}"


def test_only_titan_imports_torchtitan():
    for path, part in modules():
        if part != "titan":
            assert not any(name.split(".")[0] == "torchtitan" for name in imported(path)), path


def test_reference_and_kernels_know_nothing_of_each_other():
    """One is the oracle of the other."""
    for path, part in modules():
        others = {"reference": ("triton", "mxtrain.kernels"), "kernels": ("torchao", "mxtrain.reference")}.get(part, ())
        assert not any(name == other or name.startswith(f"{other}.") for name in imported(path) for other in others)


def test_torchaos_prototype_names_are_imported_in_one_file():
    users = [
        path.relative_to(PACKAGE).as_posix()
        for path, _ in modules()
        if any(n.startswith("torchao.prototype") for n in imported(path))
    ]
    assert users == ["reference/casts.py"]


def test_importing_mxtrain_or_its_command_line_does_not_import_torch():
    code = "import sys, mxtrain, mxtrain.cli, mxtrain.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
