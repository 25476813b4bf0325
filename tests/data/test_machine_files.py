import gzip

import pytest

from mxtrain.data import DataConfig, machine_files, prepare
from mxtrain.data.machine_files import has_control_characters, list_files, read_bytes
from mxtrain.data.progress import Progress
from mxtrain.data.python_source import PythonSource

SILENT = Progress(lambda line: None)


@pytest.fixture
def machine(python_machine, prose):
    """A machine with Python, headers, documentation and manual pages."""
    packages = {"numpy/core.py": prose(1), "numpy/a.h": prose(2), "numpy/b.so": b"\0", "numpy/README.md": prose(3)}
    system = {
        "include/stdio.h": prose(4), "include/c++/vector": "no suffix", "doc/bash/README.md": prose(5),
        "doc/bash/copy.md": prose(5), "doc/bash/NEWS.gz": "", "doc/bash/page.html": "<p>",
        "man/man1/ls.1.gz": gzip.compress(prose(6).encode()), "man/man3/printf.3posix": prose(7), "man/index.db": "x",
    }  # fmt: skip
    python_machine({"a.py": prose(0), "LICENSE.txt": "free"}, packages, system)


def kept(**fields) -> tuple[list[str], PythonSource]:
    source = PythonSource(DataConfig(**fields))
    source.scan(SILENT)
    return sorted(document.key for document in source.documents()), source


def test_other_files_come_to_those_that_are_read(machine):
    assert [file.key for file in list_files(installed=False)] == ["stdlib/a.py"]
    own, system = ["stdlib/LICENSE.txt", "stdlib/a.py"], ["include/stdio.h", "doc/bash/README.md", "doc/bash/copy.md"]
    system += ["man/man1/ls.1.gz", "man/man3/printf.3posix"]
    packages = [f"site-packages/numpy/{name}" for name in ("README.md", "a.h", "core.py")]
    assert [file.key for file in list_files(False, True)] == own + system
    assert [file.key for file in list_files(True, True)] == own + packages + system


def test_compressed_text_is_read_and_duplicates_are_dropped(machine, prose):
    keys, source = kept(other_files=True, package_share=1.0)
    assert "man/man1/ls.1.gz" in keys and len([key for key in keys if key.startswith("doc/")]) == 1
    assert prose(6) in [document.text for document in source.documents()]
    assert source.dropped["duplicate"] == 1
    assert source.text_bytes == sum(len(document.text) for document in source.documents())


def test_files_that_are_no_text_or_too_long_are_dropped(python_machine, prose, monkeypatch):
    monkeypatch.setattr(machine_files, "MAX_FILE_BYTES", 9_000)
    monkeypatch.setattr("mxtrain.data.python_source.MAX_FILE_BYTES", 9_000)
    long = prose(1, 3000)
    assert len(long) > 9_000
    python_machine(
        {"a.py": prose(0), "b.py": long, "c.py": prose(2) + "\0"},
        system={
            "doc/x/long.txt": long, "man/man1/long.1.gz": gzip.compress(long.encode()), "doc/x/font.txt": "a\1b" * 9,
            "doc/x/latin.txt": "é".encode("latin-1"), "man/man1/cut.1.gz": gzip.compress(b"abc" * 99)[:-20],
            "man/man1/no.1.gz": b"no gzip", "doc/x/color.txt": "\x1b[1mbold\x1b[0m\f",
        },
    )  # fmt: skip
    keys, source = kept(other_files=True, package_share=1.0)
    assert keys == ["doc/x/color.txt", "stdlib/a.py", "stdlib/b.py", "stdlib/c.py"]  # Python is as it was
    assert +source.dropped == {"over 0.0 MB": 2, "not text": 1, "unreadable": 3}


def test_max_bytes_counts_decompressed_text(machine):
    for limit in (5_000, 8_000):
        assert 0 < kept(other_files=True, package_share=1.0, max_bytes=limit)[1].text_bytes <= limit


def test_other_files_have_the_split_of_their_path_and_a_key_of_their_own_in_the_cache(machine, prose):
    def prepared(**fields):
        return prepare(DataConfig(vocab_size=300, validation_share=0.3, package_share=1.0, **fields), lambda line: None)

    alone, more = prepared(), prepared(other_files=True)
    assert alone.folder != more.folder and more.report.documents == 6
    assert 0 < more.report.validation_documents < 6
    assert prepared(other_files=True).identity == more.identity


def test_control_characters():
    assert not has_control_characters("a\tb\r\n\f\v\x1b é\u2028".encode())
    assert has_control_characters(b"a\0") and has_control_characters(b"\x08")


def test_python_source_of_any_length_is_read_whole(python_machine):
    python_machine({"a.py": "x = 1\n" * 200_000})
    (file,) = list_files(False)
    assert len(read_bytes(file)) == 1_200_000
