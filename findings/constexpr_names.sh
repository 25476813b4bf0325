#!/usr/bin/env bash
# Inductor copies a kernel's constexpr_function without the tuple that it names; Triton compiles the same kernel.
#
# Versions:  torch 2.13.0, triton 3.7.0, compiled for compute capability 9.0 on a CPU.
# Belief:    torch.compile takes a user's Triton kernel with all that it reaches: jitted functions, functions of
#            constants, and their globals, as Triton does, which compiles the kernel.
# Fact:      Into the module that it generates, Inductor writes globals that are numbers, strings or tl.constexpr. It
#            leaves out tuples and dictionaries in silence. The function of constants is there, and its name is not.
# Matters:   The kernel works in eager mode, in every test of its own and in the interpreter. Under torch.compile, a
#            compile worker fails with a NameError in the generated module. Compare with each string, or call a method.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 triton==3.7.0 numpy

cat >"$folder/kernels.py" <<'PYTHON'
import torch
import triton
import triton.language as tl
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as copied
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROUNDINGS = ("down", "up")
STEP = 2


@triton.constexpr_function
def is_known(ROUNDING):
    return ROUNDING in ROUNDINGS


@triton.constexpr_function
def step():
    return STEP


@triton.jit
def add(x, ROUNDING: tl.constexpr):
    if is_known(ROUNDING):
        tl.store(x, tl.load(x) + step())


source = ASTSource(add, {"x": "*fp32", "ROUNDING": "constexpr"}, {(1,): "up"})
cubin = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
lines = copied(add).splitlines()
print(f"Triton compiles it: {len(cubin) > 0}")
print(f"Inductor copies is_known: {'def is_known(ROUNDING):' in lines}, STEP: {'STEP = 2' in lines},"
      f" ROUNDINGS: {any(line.startswith('ROUNDINGS =') for line in lines)}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/kernels.py" | tee "$folder/seen"
if grep -q "compiles it: True" "$folder/seen" &&
    grep -q "copies is_known: True, STEP: True, ROUNDINGS: False" "$folder/seen"; then
    echo "as found: the tuple is left out"
else
    echo "changed"; exit 1
fi
