#!/usr/bin/env bash
# A user's kernel with triton.Config(maxnreg=...) loses its limit of registers in the code that torch.compile generates.
#
# Versions:  torch 2.13.0, triton 3.7.0, compiled for compute capability 9.0 on a CPU.
# Belief:    Of a kernel under triton.autotune, torch.compile keeps the configurations: num_warps, num_stages, maxnreg.
# Fact:      Inductor writes each configuration into its code as config_to_dict gives it, without maxnreg, and builds it
#            anew from there with config_from_dict. No line tells. A "maxnreg" among the keyword arguments of the
#            configuration, where a kernel's own constants belong, survives.
# Matters:   Eager mode, where the configuration was tuned, has the limit. The compiled model runs other machine code:
#            with more registers fewer programs fit on a multiprocessor. Results are equal, so only a profile shows it.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 triton==3.7.0 numpy

cat >"$folder/registers.py" <<'PYTHON'
import re

import triton
import triton.language as tl
from torch._inductor.runtime.triton_heuristics import config_from_dict, config_to_dict
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def double(x):
    i = tl.arange(0, 4096)
    tl.store(x + i, 2 * tl.load(x + i))


def limit(config):
    """The limit in the kernel's PTX."""
    options = {name: value for name, value in config.all_kwargs().items() if value is not None}
    compiled = triton.compile(ASTSource(double, {"x": "*fp32"}), target=GPUTarget("cuda", 90, 32), options=options)
    found = re.search(r"\.maxnreg (\d+)", compiled.asm["ptx"])
    return int(found[1]) if found else None


stated = triton.Config({}, num_warps=4, maxnreg=64)
written = config_to_dict(stated)
among = config_from_dict(config_to_dict(triton.Config({"maxnreg": 64}, num_warps=4)))
print(f"Inductor writes {written}")
print(f"limits: stated {limit(stated)}, after Inductor {limit(config_from_dict(written))}, among arguments {limit(among)}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/registers.py" | tee "$folder/seen"
if grep -q "limits: stated 64, after Inductor None, among arguments 64" "$folder/seen"; then
    echo "as found: the limit is lost"
else
    echo "changed"; exit 1
fi
