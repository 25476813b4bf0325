#!/usr/bin/env bash
# TorchTitan's WANDB_RUN_TAGS becomes one tag per letter.
#
# Versions:  torchtitan 0.2.2, wandb 0.31.0, torch 2.13.0, triton 3.7.0, torchao 0.18.0.
# Belief:    WANDB_RUN_TAGS=first,try gives a run the tags "first" and "try", as wandb's own WANDB_TAGS does.
# Fact:      TorchTitan hands the text to wandb.init(tags=...), which expects a sequence of texts and takes the letters.
# Matters:   filters by tag in wandb's workspace find nothing, and nothing warns. WANDB_TAGS works, as long as
#            WANDB_RUN_TAGS is unset.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0
"$folder/venv/bin/python" -m pip install -q torchtitan==0.2.2 wandb==0.31.0 triton==3.7.0 torchao==0.18.0 numpy

cat >"$folder/tags.py" <<'PYTHON'
import sys

import wandb
from torchtitan.components.metrics import WandBLogger
from torchtitan.config import JobConfig

WandBLogger(sys.argv[1], JobConfig())
print("tags:", *sorted(wandb.run.tags))
wandb.finish()
PYTHON

seen() {
    env WANDB_MODE=offline WANDB_SILENT=true "$1=first,try" \
        "$folder/venv/bin/python" -W ignore "$folder/tags.py" "$folder/$1" 2>"$folder/errors" | grep tags: ||
        cat "$folder/errors" >&2
}
run_tags="$(seen WANDB_RUN_TAGS)"
own_tags="$(seen WANDB_TAGS)"
echo "WANDB_RUN_TAGS=first,try  $run_tags"
echo "WANDB_TAGS=first,try      $own_tags"

if [ "$run_tags" = "tags: , f i r r s t t y" ] && [ "$own_tags" = "tags: first try" ]; then
    echo "as found: letters from WANDB_RUN_TAGS, words from WANDB_TAGS"
else
    echo "changed"
    exit 1
fi
