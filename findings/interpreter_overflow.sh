#!/usr/bin/env bash
# Triton's interpreter computes every integer sum and product again to find overflows, and then does not look.
#
# Versions:  triton 3.7.0, torch 2.13.0, TRITON_INTERPRET=1, on a CPU.
# Belief:    The interpreter's option sanitize_overflow, which is True, reports an int32 sum that overflows. A user who
#            sees no report has no overflow, and one who does not want the check sets debug = False and does not pay.
# Fact:      The sum is computed in int64, too, and compared with both limits, but the assertion that follows returns
#            unless debug is on, which is off. The overflow passes in silence, and integer code takes far longer.
# Matters:   Tests of kernels without a GPU miss overflowed offsets, and spend much of their time on the check.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 triton==3.7.0 numpy

cat >"$folder/sums.py" <<'PYTHON'
import time
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder as builder


@triton.jit
def add_often(out, x, TIMES: tl.constexpr):
    total = tl.load(x)
    for _ in range(TIMES):
        total = total + 1
    tl.store(out, total)


def run(start: int) -> tuple[int, float]:
    x, out = (torch.tensor([value], dtype=torch.int32) for value in (start, 0))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        add_often[(1,)](out, x, TIMES=1000)
        seconds.append(time.perf_counter() - begin)
    return out.item(), min(seconds)


options = builder.options
result, checked = run(2**31 - 1)
print(f"sanitize_overflow {options.sanitize_overflow}, debug {options.debug}: no error, 2^31 - 1 + 1000 is {result}")
builder.options = replace(options, sanitize_overflow=False)
_, unchecked = run(0)
print(f"with sanitize_overflow the same sums take {checked / unchecked:.1f} times as long")
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" -W ignore "$folder/sums.py" 2>"$folder/errors" | tee "$folder/seen"
if grep -q "sanitize_overflow True, debug False: no error, 2^31 - 1 + 1000 is -2147482649" "$folder/seen" &&
    grep -qE "take ([2-9]|1[0-9])\.[0-9] times as long" "$folder/seen"; then
    echo "as found: overflows are computed, and not reported"
else
    cat "$folder/errors"; echo "changed"; exit 1
fi
