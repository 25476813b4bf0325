#!/usr/bin/env bash
# Under FSDP2, torch.optim.Muon updates tall matrices by other values, and communicates a dozen times for each matrix.
#
# Versions:  torch 2.13.0, gloo, on a CPU.
# Belief:    torch.optim.Muon takes the DTensors of FSDP2 without a word, so it makes the update of one process, up to
#            rounding: permuting rows and columns of a gradient moves the update by at most 0.4 % of its norm.
# Fact:      Newton-Schulz runs on the shards as DTensor operations. With equal gradients, the update of a 96 x 64 matrix
#            is off by 2 %, that of a 64 x 96 matrix is not. They take 11 and 16 collectives in every step.
# Matters:   Runs on other numbers of GPUs do not compare, and small models wait for the network. Gathering the momentum
#            once, and computing on the whole matrix, takes one collective and gives the update of one process.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy

cat >"$folder/steps.py" <<'PYTHON'
import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

dist.init_process_group("gloo")
torch.manual_seed(0)
for rows, columns in (96, 64), (64, 96):
    alone = torch.nn.Linear(columns, rows, bias=False)
    before, x, shards = alone.weight.detach().clone(), torch.randn(512, columns), copy.deepcopy(alone)
    fully_shard(shards)
    for layer in alone, shards:
        layer(x).square().sum().backward()
        with CommDebugMode() as communication:
            torch.optim.Muon(layer.parameters(), lr=0.1, weight_decay=0).step()
    updates = [weight.detach() - before for weight in (alone.weight, shards.weight.full_tensor())]
    error = ((updates[1] - updates[0]).norm() / updates[0].norm()).item()
    same = torch.allclose(shards.weight.grad.full_tensor(), alone.weight.grad, rtol=1e-5, atol=1e-4)
    if dist.get_rank() == 0:
        calls = communication.get_total_counts()
        print(f"{rows} x {columns}: equal gradients {same}, update off by {error:.1%}, {calls} collectives")
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/steps.py" 2>"$folder/errors" | tee "$folder/seen"
tall="96 x 64: equal gradients True, update off by [1-9]\.[0-9]%, 1[0-9] collectives"
if grep -qE "$tall" "$folder/seen" && grep -qE "64 x 96: .* off by 0\.[0-9]%, 1[0-9] collectives" "$folder/seen"; then
    echo "as found: another update than in one process"
else
    echo "changed"; exit 1
fi
