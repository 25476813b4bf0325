"""Print the names that mxtrain uses of TorchTitan and that a copy of TorchTitan does not have.

    python scripts/titan_imports.py ../torchtitan [--release v03]

Nothing is imported: both packages are read as source. A name is a module, or what a module defines or imports; fields
of classes and arguments of functions are not compared. The exit status is 1 if a name is gone, else 0.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from symtable import symtable

PACKAGE = Path(__file__).parents[1] / "mxtrain"


def used_names(package: Path, release: str) -> Iterator[tuple[str, Path]]:
    """Yield each name of TorchTitan, dotted, with a file that uses it. Of releases' folders, read only this one."""
    for path in sorted(package.rglob("*.py")):
        if any(folder.startswith("v0") and folder != release for folder in path.relative_to(package).parts):
            continue
        imported, found = {}, {}
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(module=str(module)):
                    names = {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
                    imported, found = imported | names, found | dict.fromkeys(names.values())
                case ast.Import():
                    names = {alias.asname or alias.name: alias.name for alias in node.names}
                    imported, found = imported | names, found | dict.fromkeys(names.values())
                case ast.Call(func=ast.Name("patch"), args=[ast.Constant(str(name)), *_]):
                    found[name] = None
                case ast.Attribute(value=ast.Name(owner)) if owner in imported:
                    found[f"{imported[owner]}.{node.attr}"] = None
        yield from ((name, path.relative_to(package.parent)) for name in found if name.startswith("torchtitan."))


def has_name(titan: Path, name: str) -> bool:
    """Whether the package in a folder has a module, or the first part of the name that is no module."""
    here = titan
    for part in name.split(".")[1:]:
        below = next((path for path in (here / part, here / f"{part}.py") if path.exists()), None)
        if below is None:
            file = here / "__init__.py" if here.is_dir() else here
            symbols = symtable(file.read_text(), str(file), "exec").get_symbols() if file.exists() else []
            return any(s.get_name() == part and (s.is_assigned() or s.is_imported()) for s in symbols)
        here = below
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="TorchTitan's package or repository")
    parser.add_argument("--release", default="v03", help="a folder of mxtrain/titan (default: %(default)s)")
    args = parser.parse_args(arguments)
    titan = args.folder / "torchtitan" if (args.folder / "torchtitan").is_dir() else args.folder
    if not (titan / "train.py").exists():
        parser.error(f"folder = '{args.folder}' has no package torchtitan")
    gone = {(name, file) for name, file in used_names(PACKAGE, args.release) if not has_name(titan, name)}
    for name, file in sorted(gone):
        if (name.rpartition(".")[0], file) not in gone:  # else an attribute of a name that is gone
            print(f"{name}: {file}")
    return bool(gone)


if __name__ == "__main__":
    sys.exit(main())
