#!/usr/bin/env bash
# Packing FP8 codes of several rows into words, a Triton kernel gets bits of the stack pointer in the place of codes.
#
# Versions:  triton 3.6.0 and the ptxas that comes with it, compiled for compute capability 9.0 on a CPU.
# Belief:    Codes may be shifted and added up as integers, like any others: every register that the generated code
#            reads holds a value, and where one half of a register is not set, only the other half counts.
# Fact:      For fp32 input, Triton's PTX joins codes with 16-bit registers that no instruction sets, and masks them
#            away. By PTX's rules that is right. ptxas gives such a half the register of the stack pointer, and then
#            masks the stack pointer in the place of the codes. For bf16 input the same kernel is right.
# Matters:   There is no error and no warning; the interpreter has the right bits. On an H200, such a cast for weight
#            gradients stored wrong codes, and the loss of 20 steps did not show it. Writing the conversion and the
#            packing as one piece of inline PTX avoids it; looking for registers that nothing sets finds it on a CPU.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q triton==3.6.0 setuptools

cat >"$folder/pack.py" <<'PYTHON'
import re
import subprocess
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def pack_columns(x, out):
    row, column = tl.arange(0, 128), tl.arange(0, 64)
    values = tl.load(x + row[:, None] * 64 + column[None, :]).to(tl.float32)
    codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    words = tl.sum(tl.reshape(codes, (4, 4, 8, 64)).to(tl.int32) << (tl.arange(0, 4) * 8)[None, :, None, None], 1)
    tl.store(out + column[:, None] * 32 + tl.arange(0, 32)[None, :], tl.reshape(tl.permute(words, (2, 1, 0)), (64, 32)))


tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
for dtype in ("fp32", "bf16"):
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(2)}
    source = ASTSource(pack_columns, {"x": f"*{dtype}", "out": "*i32"}, {}, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    joins = re.findall(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\};", kernel.asm["ptx"])
    others = re.sub(r"mov\.b32\s+%r\d+, \{.*?\};", "", kernel.asm["ptx"])
    unset = {half for pair in joins for half in pair} - set(re.findall(r"%rs\d+", others))
    Path("cubin").write_bytes(kernel.asm["cubin"])
    sass = subprocess.run([tools / "nvdisasm", "-c", "cubin"], capture_output=True, text=True, check=True).stdout
    masked = re.findall(r"LOP3\.LUT R\d+, R1(?:\.reuse)?, 0xffff", sass)
    print(f"{dtype}: {len(unset)} halves that nothing sets; the stack pointer is masked {len(masked)} times")
PYTHON
(cd "$folder" && "$folder/venv/bin/python" pack.py) | tee "$folder/seen"
if grep -qE "fp32: [1-9][0-9]* halves .* masked [1-9][0-9]* times" "$folder/seen" &&
    grep -q "bf16: 0 halves that nothing sets; the stack pointer is masked 0 times" "$folder/seen"; then
    echo "as found: bits of the stack pointer stand in the place of codes"
else
    echo "changed"; exit 1
fi
