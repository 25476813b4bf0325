"""Every kernel compiles to PTX and cubin for Ampere, Hopper and Blackwell, without a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "tests" / "support" / "cross_compile.py"
HARDWARE_CONVERSION = "cvt.rn.satfinite.{}x2.f32"
FP4_CONVERSION = "cvt.rn.satfinite.e2m1x2.f32"
LOAD = re.compile(r"(?:ld\.global|cp\.async\.c[ag])[\w.:]*")
ATOMIC = re.compile(r"\b(?:atom|red)\.[\w.:]+")
# Instructions that flush denormals where it changes nothing, by kernel. Block scales, and a mean square plus eps, are
# never denormal. SwiGLU adds 1 to exp2, whose argument may be 0 instead of denormal.
RSQRT = "rsqrt.approx.ftz.f32"
MAY_FLUSH = {
    "nvfp4": "rcp.approx.ftz.f32",
    "rms_norm ": RSQRT,
    "layer_norm ": RSQRT,
    "swiglu": "ex2.approx.ftz.f32",
}
# Loads of at least 16 bytes. A copy to shared memory that bypasses L1 always has 16.
IS_WIDE = re.compile(r"\.(v4\.\w32|v2\.\w64|v8\.\w32|v4\.\w64)$|^cp\.async\.cg")
IS_HALF_WIDE = re.compile(r"\.v[24]\.\w32$")
# A register made of two halves.
JOIN = re.compile(r"mov\.b32\s+(%r\d+), \{(%rs\d+), (%rs\d+)\};")
# A register made of four bytes of two others; a digit of the last number is the place of a byte.
PICK = re.compile(r"prmt\.b32\s+(?:%r\d+), (%r\d+), (%r\d+), 0x([0-9A-F]+)U?;")


def compile_kernels(capability: int, which: str, folder: Path) -> dict:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, SCRIPT, str(capability), which]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "FP_FUSION" not in run.stderr, "a launch leaves floating-point fusion to Triton's default"
    return json.loads(run.stdout)


def faults_of_a_product(case: str, ptx: str, launches: int, capability: int) -> list[str]:
    found = []
    is_first = ", launch " not in case
    if ("mma" in ptx) != (is_first and "fp32" not in case and "few" not in case):
        found.append("tensor cores used, or not, against expectation")
    if "tf32" in ptx:
        found.append("fp32 operands are truncated to TF32")
    # For few tokens one step covers all of K.
    if is_first and "few" not in case and "cp.async" not in ptx:
        found.append("no load is in flight ahead of its use")
    if launches != (1 if "few" in case or "unsplit" in case else 2):
        found.append(f"{launches} launches")
    if ("griddepcontrol.wait" in ptx) != (capability >= 90):
        found.append("griddepcontrol.wait missing or not supported")
    if ("griddepcontrol.launch_dependents" in ptx) != (capability >= 90 and launches == 2 and is_first):
        found.append("griddepcontrol.launch_dependents missing or unexpected")
    if capability >= 90 and LOAD.search(ptx).start() < ptx.find("griddepcontrol.wait"):
        found.append("reads before the previous launch has ended")
    return found


def halves_without_a_value(ptx: str) -> set[str]:
    """The 16-bit registers that are read as a half of another one, also byte by byte, and set nowhere.

    Where ptxas knows the other half, it may take the stack pointer for both.
    """
    others, picks = PICK.sub("", JOIN.sub("", ptx)), set()
    for *pair, digits in PICK.findall(ptx):
        places = [int(digit, 16) % 8 for digit in digits.zfill(4)]
        picks |= {(pair[place // 4], place % 4 // 2) for place in places}
    found, are_set, are_read = set(), set(re.findall(r"%rs\d+", others)), set(re.findall(r"%r\d+", others))
    for whole, *halves in JOIN.findall(ptx):
        read = {half for at, half in enumerate(halves) if whole in are_read or (whole, at) in picks}
        found |= read - are_set
    return found


def faults(
    case: str, ptx: str, cubin_bytes: int, fits: bool, launches: int, prepared: bool, capability: int
) -> list[str]:
    """Return what is wrong with one compiled kernel."""
    found = []
    waits = "griddepcontrol.wait" in ptx
    if waits != prepared:
        found.append("waits, but its launch is not overlapped" if waits else "does not wait for the previous launch")
    if not fits:
        found.append("more shared memory than a program has on this GPU")
    if f".target sm_{capability}" not in ptx or not cubin_bytes:
        found.append("not compiled for this GPU")
    casts = case.startswith(("mxnorm_cast", "cast", "swiglu"))
    element = next((element for element in ("e5m2", "e2m1") if element in case), "e4m3")
    if capability >= 90 and casts and (HARDWARE_CONVERSION.format(element) in ptx) != (element != "e2m1"):
        found.append("hardware conversion missing or unexpected")
    if capability < 89 and "e4m3" in ptx:
        found.append("an E4M3 conversion that this GPU does not have")
    packs = case.startswith(("nvfp4_norm", "nvfp4_rows", "nvfp4_weight", "nvfp4_cast")) and (
        "codes" in case or "blocked" in case
    )
    if (FP4_CONVERSION in ptx) != (capability >= 100 and packs and "gradient" not in case):
        found.append("hardware E2M1 conversion missing or unexpected")
    for kernel, instruction in MAY_FLUSH.items():
        ptx = ptx.replace(instruction, "") if case.startswith(kernel) else ptx
    if halves := halves_without_a_value(ptx):
        found.append(f"reads {', '.join(sorted(halves))}, which no instruction sets")
    transposes = case.startswith(("cast", "swiglu", "nvfp4_cast", "nvfp4_weight"))
    if "max.NaN" in ptx and transposes and ("codes" in case or "blocked" in case):
        found.append("a maximum that keeps NaN beside transposed bytes, which Triton may miscompile")
    if ".ftz" in ptx:
        found.append("denormals are flushed to zero")
    if ATOMIC.search(ptx) and not case.startswith("nvfp4_tensor_scales"):  # a maximum has no order
        found.append("atomics, whose order varies from run to run")
    if case.startswith("decompose_k"):
        found += faults_of_a_product(case, ptx, launches, capability)
    loads = LOAD.findall(ptx)
    # Strip kernels load eight bytes at a time: a thread has no registers for more.
    is_wide = IS_HALF_WIDE if case.startswith(("nvfp4_cast", "nvfp4_tensor_scales", "nvfp4_weight")) else IS_WIDE
    wide = [load for load in loads if is_wide.search(load)]
    if not wide and " one " not in case:
        found.append(f"no wide loads: {sorted(set(loads))}")
    reads_vectors = any(word in case for word in ("factor", "source", " one "))
    if casts and not reads_vectors and len(wide) < len(loads):
        found.append(f"narrow loads: {sorted(set(loads) - set(wide))}")
    if case.startswith(("rms_norm_backward", "layer_norm_backward")) and " one " not in case and "launch" not in case:
        # Rows of 16384 fill the SM, so their plan has no second load in flight.
        if "cp.async" not in ptx and "16384 columns" not in case:
            found.append("no load is in flight ahead of its use")
    return [f"{case}: {fault}" for fault in found]


@pytest.mark.sweep
@pytest.mark.parametrize(("capability", "which"), [(80, "few"), (90, "all"), (100, "few")])
def test_every_case_compiles(capability, which, tmp_path):
    compiled = compile_kernels(capability, which, tmp_path)
    assert {case.split()[0] for case in compiled} == {
        "mxnorm_cast", "cast", "swiglu_cast", "swiglu_backward_cast", "norm_backward", "fold_backward", "rms_norm",
        "rms_norm_backward", "layer_norm", "layer_norm_backward", "decompose_k", "nvfp4_norm", "nvfp4_rows",
        "nvfp4_cast", "nvfp4_tensor_scales", "nvfp4_weight", *(["decode_tiles"] if capability >= 89 else []),
    }  # fmt: skip
    assert [fault for case, result in compiled.items() for fault in faults(case, **result, capability=capability)] == []
