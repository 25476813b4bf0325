import bz2
import gzip
import io
import lzma
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxtrain.data import text_files
from mxtrain.data.text_files import open_text, split_lines


def split_whole(text: str, size: int) -> list[str]:
    """The same cuts, made with the whole text in memory."""
    pieces, start = [], 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1
        if end == 0:
            end = text.find("\n", start + size) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def pieces_of(text: str, size: int) -> list[str]:
    return list(split_lines(io.StringIO(text, newline="\n"), size))


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("", [""]),
        ("abc", ["abc"]),
        ("ab\ncd\nef", ["ab\n", "cd\nef"]),
        ("a\nbbbbbbbbbb\nc\nd", ["a\n", "bbbbbbbbbb\n", "c\nd"]),
        ("aaaaaaaaaa", ["aaaaaaaaaa", ""]),
    ],
)
def test_split_lines_cuts_after_line_ends(text, pieces):
    assert pieces_of(text, 5) == pieces == split_whole(text, 5)


@given(st.text(alphabet="a\n\u2028é", max_size=200), st.integers(1, 9), st.integers(1, 20))
def test_pieces_do_not_depend_on_how_much_is_read_at_once(text, size, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "READ_CHARACTERS", at_once)
        assert pieces_of(text, size) == split_whole(text, size)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("text", ["one\r\ntwo\rthree\n é\u2028", "", "BZh of a text"])
def test_compression_shows_in_the_contents_and_all_line_ends_become_one(tmp_path, name, compress, text):
    (tmp_path / name).write_bytes(compress(text.encode()))
    with open_text(tmp_path / name) as file:
        assert file.read() == text.replace("\r\n", "\n").replace("\r", "\n")


PEAK_OF_READING = """
import resource, sys
from mxtrain.data import DataConfig
from mxtrain.data.local_files import LocalFiles
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in LocalFiles(DataConfig(dataset="files", path=sys.argv[1])).documents())
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(count, (after - before) * 1024)
"""


@pytest.mark.parametrize("compressed", [False, True])
def test_memory_does_not_grow_with_the_file(tmp_path, compressed):
    size, line = 100_000_000, b"a line of sixty-four characters, as in a typical text of a book\n"
    path = tmp_path / "large.txt"
    with gzip.open(path, "wb", compresslevel=1) if compressed else path.open("wb") as file:
        for _ in range(size // len(line) // 1000):
            file.write(line * 1000)
    command = [sys.executable, "-c", PEAK_OF_READING, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    count, grown = map(int, result.stdout.split())
    assert count > size // (1 << 16) and grown < size // 5


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_byte_order_mark_at_the_start_is_no_text(tmp_path, compress):
    file = tmp_path / "a.txt"
    file.write_bytes(compress("\ufeffhello \ufeff".encode()))
    with open_text(file) as text:
        assert text.read() == "hello \ufeff"
