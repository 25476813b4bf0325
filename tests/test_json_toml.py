"""Files of other people: every fault is one line that names the file."""

import pytest

from mxtrain.errors import ConfigError
from mxtrain.json_toml import read_json, read_toml

NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "read, content, problem",
    [
        (read_json, NESTED, "is not valid JSON: it is nested too deep"),
        (read_toml, f"a = {NESTED}", "is not valid TOML: it is nested too deep"),
        (read_json, b'{"a": "\xff"}', "is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 7"),
        (read_toml, b'a = "\xff"', "is not valid TOML: 'utf-8' codec can't decode byte 0xff in position 5"),
        (read_json, '{"a": ' + "1" * 20_000 + "}", "is not valid JSON: Exceeds the limit"),
        (read_json, "[1]", "holds list, not dict"),
        (read_json, "7", "holds int, not dict"),
    ],
)
def test_bad_content(tmp_path, read, content, problem):
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("", "MODEL_DIR: config.json"):
        with pytest.raises(ConfigError) as error:
            read(path, name)
        assert str(error.value).startswith(f"{name or path} {problem}") and "\n" not in str(error.value)


def test_what_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory$"):
        read_json(tmp_path)


def test_a_missing_file_is_for_the_caller(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "file")


def test_good_files(tmp_path):
    path = tmp_path / "file"
    path.write_text('\ufeff{"a": [1, NaN, -Infinity]}', encoding="utf-8")  # with a BOM
    assert str(read_json(path)) == "{'a': [1, nan, -inf]}"
    path.write_text("\ufeffa.b = [1, nan]", encoding="utf-8")
    assert str(read_toml(path)) == "{'a': {'b': [1, nan]}}"
    path.write_text("[1]")
    assert read_json(path, kind=list) == [1]
