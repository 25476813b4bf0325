import pytest

from mxtrain.files import replace_file


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, full_disk):
    path = tmp_path / "file"
    replace_file(path, b"old")
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        replace_file(path, b"x" * 1000)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    replace_file(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]
