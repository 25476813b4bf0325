"""Checkpoints of somebody who wants to run code, with manifests that fit."""

import os
import pickle
from dataclasses import replace

from mxtrain.checkpoints.folder import DCP_METADATA, read_manifest, write_manifest
from mxtrain.files import hash_file


class Code:
    """Makes the folder ``mark`` when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


NAME = f"{os.mkdir.__module__}.mkdir"


def put_code_into_index(checkpoint, mark) -> None:
    content = (checkpoint / DCP_METADATA).read_bytes()
    index = pickle.loads(content)
    index.planner_data = Code(mark)
    (checkpoint / DCP_METADATA).write_bytes(pickle.dumps(index))
    fit_manifest(checkpoint)


def fit_manifest(checkpoint) -> None:
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, replace(manifest, files={name: hash_file(checkpoint / name) for name in manifest.files}))
