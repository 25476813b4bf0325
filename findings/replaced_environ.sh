#!/usr/bin/env bash
# After ``Dataset.map`` with several processes, ``os.environ`` is another object than before.
#
# Versions:  datasets 5.2.0.
# Belief:    a library may change variables of the environment, but ``os.environ`` itself stays what it is.
# Fact:      map(num_proc=2) ends with a deep copy of the mapping as ``os.environ``. What is set through an older reference
#            (``from os import environ``, a decorator ``mock.patch.dict(os.environ, ...)``) is in no later ``os.environ``,
#            although child processes get it.
# Matters:   a launcher or test that sets LOCAL_RANK or MASTER_PORT after it has tokenized a text sets it for nobody in its
#            process: the trainer then says that the variable is not set.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q datasets==5.2.0

cat >"$folder/map.py" <<'PYTHON'
import os
import subprocess
from os import environ

import datasets

datasets.disable_progress_bars()


def add_one(row):
    return {"x": row["x"] + 1}


for processes in (None, 2):
    datasets.Dataset.from_dict({"x": [1, 2, 3, 4]}).map(add_one, num_proc=processes)
    print(f"num_proc={processes}: os.environ is {'the same' if os.environ is environ else 'another'} object")
environ["LOCAL_RANK"] = "0"
child = subprocess.run(["printenv", "LOCAL_RANK"], capture_output=True, text=True).stdout.strip()
print(f"set through the older reference: os.environ has {os.environ.get('LOCAL_RANK')}, a child process {child}")
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/map.py" | tee "$folder/seen.txt"
if diff - "$folder/seen.txt" <<'TEXT'; then
num_proc=None: os.environ is the same object
num_proc=2: os.environ is another object
set through the older reference: os.environ has None, a child process 0
TEXT
    echo "as found: os.environ is replaced"
else
    echo "changed"
    exit 1
fi
