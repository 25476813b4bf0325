#!/usr/bin/env bash
# Over gloo, one coalesced all-gather of tensors of two dtypes returns wrong values, without an error.
#
# Versions:  torch 2.13.0, gloo, on a CPU.
# Belief:    all_gather_into_tensor_coalesced gathers every tensor of its list as all_gather_single would gather it alone,
#            whatever their dtypes; or it refuses a list that it cannot gather.
# Fact:      two processes gather uint8 [4] and fp32 [2]. The uint8 result holds the bytes of fp32 numbers, and the fp32
#            result zeros. Each tensor alone, or both as uint8, is gathered right.
# Matters:   codes and their scales are natural to send together, and gloo is what layouts are tested with before there
#            are GPUs. The test of a layout then fails, or passes with zeros, for a reason that NCCL does not have.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy

cat >"$folder/gather.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

dist.init_process_group("gloo")
rank = dist.get_rank()
codes, scales = torch.full((4,), rank + 1, dtype=torch.uint8), torch.full((2,), rank + 0.5)


def gathered(*tensors):
    found = collectives.all_gather_into_tensor_coalesced(list(tensors), dist.group.WORLD)
    return [collectives.wait_tensor(each) for each in found]


alone = [gathered(each)[0] for each in (codes, scales)]
as_bytes = gathered(codes, scales.view(torch.uint8))
as_bytes[1] = as_bytes[1].view(torch.float32)
together = gathered(codes, scales)
if rank == 0:
    for name, found in ("alone", alone), ("as bytes", as_bytes), ("together", together):
        print(f"{name}: codes {found[0].tolist()}, scales {found[1].tolist()}")
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/gather.py" 2>"$folder/errors" | tee "$folder/seen"
right="codes [1, 1, 1, 1, 2, 2, 2, 2], scales [0.5, 0.5, 1.5, 1.5]"
if [ "$(grep -cF "$right" "$folder/seen")" = 2 ] && grep -q "^together: " "$folder/seen"; then
    echo "as found: gathered together, both are wrong"
else
    echo "changed"; exit 1
fi
