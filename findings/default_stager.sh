#!/usr/bin/env bash
# DCP's DefaultStager of PyTorch 2.11 stages one checkpoint only.
#
# Versions:  torch 2.11.0 beside torch 2.13.0, on a CPU.
# Belief:    a stager serves all checkpoints of a run until close() is called, as its docstring shows, and keeps the
#            memory into which it copies.
# Fact:      in 2.11.0 every stage() closes the inner stager, so the second checkpoint raises KeyError: <class 'type'>,
#            with and without a thread of its own. 2.13.0 stages both.
# Matters:   TorchTitan 0.2.2 makes one stager for all asynchronous checkpoints with pinned memory. A short test that
#            saves once passes, and the run fails at its second checkpoint.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

cat >"$folder/stage.py" <<'PYTHON'
from concurrent.futures import Future

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

for has_thread in (False, True):
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=has_thread,
            use_non_blocking_copy=False,
        )
    )
    for number in (1, 2):
        try:
            staged = stager.stage({"weight": torch.ones(4)})
            staged = staged.result() if isinstance(staged, Future) else staged
            outcome = "staged" if staged["weight"].sum() == 4 else "wrong"
        except KeyError as error:
            outcome = f"KeyError:{error}".replace(" ", "_")
        print(f"thread={has_thread} checkpoint={number} {outcome}")
    stager.close()
PYTHON

for version in 2.11.0 2.13.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install -q "torch==$version" numpy
    "$folder/$version/bin/python" -W ignore "$folder/stage.py" >"$folder/$version.txt"
    echo "torch $version"
    cat "$folder/$version.txt"
done

if [ "$(grep -c "checkpoint=1 staged" "$folder/2.11.0.txt")" = 2 ] &&
    [ "$(grep -c "checkpoint=2 KeyError" "$folder/2.11.0.txt")" = 2 ] &&
    [ "$(grep -c staged "$folder/2.13.0.txt")" = 4 ]; then
    echo "as found: the second checkpoint fails in 2.11.0 only"
else
    echo "changed"
    exit 1
fi
