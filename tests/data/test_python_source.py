import os
import sysconfig
import zlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mxtrain.data import DataConfig
from mxtrain.data.documents import fraction
from mxtrain.data.python_source import (
    PACKAGE_SHARE,
    PythonSource,
    SourceFile,
    cap_packages,
    is_machine_made,
    list_files,
    package_limit,
)


def source_of(**fields) -> PythonSource:
    return PythonSource(DataConfig(**fields))


def keys(source: PythonSource) -> list[str]:
    return [document.key for document in source.documents()]


def size(source: PythonSource) -> int:
    return sum(document.size for document in source.documents())


def test_the_standard_library_is_listed_without_packages(python_machine):
    python_machine({"a.py": "a", "sub/b.py": "b", "c.txt": "c"}, {"numpy/core.py": "n", "six.py": "s"})
    assert [file.key for file in list_files(installed=False)] == ["stdlib/a.py", "stdlib/sub/b.py"]
    assert [(file.key, file.package) for file in list_files(installed=True)] == [
        ("stdlib/a.py", None),
        ("stdlib/sub/b.py", None),
        ("site-packages/six.py", "six"),
        ("site-packages/numpy/core.py", "numpy"),
    ]


def test_this_machines_standard_library():
    files = list_files(installed=False)
    assert len(files) > 500
    assert "stdlib/json/decoder.py" in {file.key for file in files}
    root = sysconfig.get_paths()["stdlib"]
    assert all(file.path.startswith(root) and "site-packages" not in file.path for file in files)


def test_duplicates_empty_undecodable_and_machine_made_files_are_dropped(python_machine, prose):
    text = prose(0) + "a\r\nb\u2028é\tκόσμε\n"
    table = "TABLE = [\n" + "    0x0000, 0xffff,\n" * 600 + "]\n"
    python_machine(
        {"a.py": text, "copy.py": text, "empty.py": "", "blank.py": " \n\n", "latin.py": "é".encode("latin-1"),
         "table.py": table, "b.py": prose(1)}
    )  # fmt: skip
    source = source_of()
    kept = set(keys(source))
    assert len(kept) == 2 and "stdlib/b.py" in kept and kept & {"stdlib/a.py", "stdlib/copy.py"}
    expected = {"duplicate": 1, "empty": 2, "unreadable": 1, "machine-made": 1, "over the package share": 0}
    assert source.dropped == expected
    assert size(source) == len(text.encode()) + len(prose(1))
    assert sorted(document.text for document in source.documents()) == sorted([text, prose(1)]), "byte for byte"


def test_machine_made_files_are_large_and_compress_below_0_17_at_level_1(prose):
    def content(repeats):
        return (prose(0, 4000) + "0x0000, 0xffff,\n" * repeats).encode()

    def ratio(repeats, level):
        return len(zlib.compress(content(repeats), level)) / len(content(repeats))

    assert is_machine_made(b"0x0000, 0xffff,\n" * 1000) and not is_machine_made(b"0x0000, 0xffff,\n" * 10)
    assert not is_machine_made(Path(os.__file__).read_bytes())
    below = next(repeats for repeats in range(0, 10_000, 20) if ratio(repeats, 1) < 0.17)
    assert 0.165 < ratio(below, 1) and is_machine_made(content(below))
    assert ratio(below - 20, 6) < 0.17 and not is_machine_made(content(below - 20))


def test_the_seed_decides_the_order_and_new_files_do_not_change_it(python_machine, prose):
    python_machine({f"m{i}.py": prose(i) for i in range(30)})
    order = keys(source_of(seed=1))
    assert order == keys(source_of(seed=1))
    assert order != keys(source_of(seed=2))
    by_key = sorted(order, key=lambda key: fraction(key, "order 1"))
    assert order == by_key != sorted(order), "the same wherever the folders lie"
    python_machine({f"more{i}.py": prose(100 + i) for i in range(10)})
    assert [key for key in keys(source_of(seed=1)) if "more" not in key] == order


def test_max_bytes_limits_the_text(python_machine, prose):
    python_machine({f"m{i}.py": prose(i) for i in range(20)})
    source = source_of(max_bytes=10_000)
    assert 5_000 < size(source) <= 10_000
    assert source.dropped["over max_bytes"] == 20 - len(keys(source))


def test_a_large_package_is_cut_to_its_share(python_machine, prose):
    python_machine(
        {f"m{i}.py": prose(i) for i in range(4)},
        {**{f"big/{i}.py": prose(100 + i) for i in range(40)}, "small.py": prose(50)},
    )
    source = source_of(installed=True)
    big = [document for document in source.documents() if "/big/" in document.key]
    assert 0 < sum(len(document.text) for document in big) <= PACKAGE_SHARE * size(source)
    assert "site-packages/small.py" in keys(source)
    assert source.dropped["over the package share"] == 40 - len(big)


def made(package: str | None, number: int, size: int) -> SourceFile:
    key = f"stdlib/{number}.py" if package is None else f"site-packages/{package}/{number}.py"
    return SourceFile(key, key, size, 0)


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=20),
    st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(1, 1000), min_size=1, max_size=20)),
    st.floats(0.01, 1.0),
)
def test_no_package_exceeds_its_share_and_others_are_not_cut(standard, packages, share):
    files = [made(None, i, size) for i, size in enumerate(standard)]
    files += [made(name, i, size) for name, sizes in packages.items() for i, size in enumerate(sizes)]
    kept = cap_packages(files, share)
    total = sum(file.size for file in kept)
    ideal = package_limit(sum(standard), [sum(sizes) for sizes in packages.values()], share)
    for name, sizes in packages.items():
        size = sum(file.size for file in kept if file.package == name)
        assert size <= share * total * (1 + 1e-9) and (sum(sizes) <= ideal or size < sum(sizes))
    assert [file for file in files if file in set(kept)] == kept
    assert sum(file.size for file in kept if file.package is None) == sum(standard)
