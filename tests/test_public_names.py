import ast
from pathlib import Path

import mxtrain


def test_every_public_name_is_there():
    assert len(mxtrain.__all__) == 16
    for name in mxtrain.__all__:
        assert getattr(mxtrain, name) is not None
    assert not hasattr(mxtrain, "nothing")


def test_dir_shows_public_names_only():
    assert dir(mxtrain) == sorted(mxtrain.__all__)


def test_type_checkers_import_what_users_do():
    (block,) = (node for node in ast.parse(Path(mxtrain.__file__).read_text()).body if isinstance(node, ast.If))
    imports = [(alias.name, alias.asname, line.module) for line in block.body for alias in line.names]
    assert sorted(imports) == sorted((name, name, module) for name, module in mxtrain._PUBLIC.items())
