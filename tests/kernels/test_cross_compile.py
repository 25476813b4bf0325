"""Every kernel compiles to PTX and cubin for Ampere, Hopper and Blackwell on a machine without any of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("cross_compile.py")
HARDWARE_CONVERSION = "cvt.rn.satfinite.e4m3x2.f32"
FP4_CONVERSION = "cvt.rn.satfinite.e2m1x2.f32"
LOAD = re.compile(r"(?:ld\.global|cp\.async\.c[ag])[\w.:]*")
ATOMIC = re.compile(r"\b(?:atom|red)\.[\w.:]+")
# By kernel, what flushes numbers that are never denormal: block scales, and a mean square with eps, a normal number.
NEVER_DENORMAL = {"nvfp4": "rcp.approx.ftz.f32", "rms_norm ": "rsqrt.approx.ftz.f32"}
# At least 16 bytes at a time, as a copy to shared memory past L1 always is.
IS_WIDE = re.compile(r"\.(v4\.\w32|v2\.\w64|v8\.\w32|v4\.\w64)$|^cp\.async\.cg")

IS_HALF_WIDE = re.compile(r"\.v[24]\.\w32$")


def compile_all(capability: int, folder: Path) -> dict:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    run = subprocess.run([sys.executable, SCRIPT, str(capability)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "FP_FUSION" not in run.stderr, "Triton is left to decide whether a product and a sum are one instruction"
    return json.loads(run.stdout)


def faults_of_a_product(case: str, ptx: str, launches: int, capability: int) -> list[str]:
    found = []
    is_first = ", launch " not in case
    if ("mma" in ptx) != (is_first and "fp32" not in case and "few" not in case):
        found.append("not multiplied as it should be")
    if "tf32" in ptx:
        found.append("fp32 numbers are cut to TF32")
    # Few tokens take all of K in one step.
    if is_first and "few" not in case and "cp.async" not in ptx:
        found.append("nothing is loaded ahead")
    if launches != (1 if "few" in case or "unsplit" in case else 2):
        found.append(f"{launches} launches")
    if ("griddepcontrol.wait" in ptx) != (capability >= 90):
        found.append("waits for the launch before, or does not, unlike on this GPU")
    if ("griddepcontrol.launch_dependents" in ptx) != (capability >= 90 and launches == 2 and is_first):
        found.append("lets the next launch start, or does not, unlike on this GPU")
    if capability >= 90 and LOAD.search(ptx).start() < ptx.find("griddepcontrol.wait"):
        found.append("reads before the launch before has ended")
    return found


def faults(
    case: str, ptx: str, cubin_bytes: int, fits: bool, launches: int, prepared: bool, capability: int
) -> list[str]:
    """What is wrong with one kernel as compiled."""
    found = []
    waits = "griddepcontrol.wait" in ptx
    if waits != prepared:
        found.append("waits for a launch that has ended" if waits else "does not wait for the launch before")
    if not fits:
        found.append("more shared memory than this GPU has for a program")
    if f".target sm_{capability}" not in ptx or not cubin_bytes:
        found.append("not compiled for this GPU")
    casts = case.startswith(("mxnorm_cast", "cast"))
    if capability >= 90 and casts and HARDWARE_CONVERSION not in ptx:
        found.append("no hardware conversion to E4M3")
    if capability < 89 and "e4m3" in ptx:
        found.append("a conversion to E4M3 that this GPU does not have")
    packs = case.startswith(("nvfp4_norm", "nvfp4_weight", "nvfp4_cast")) and ("codes" in case or "blocked" in case)
    if (FP4_CONVERSION in ptx) != (capability >= 100 and packs and "gradient" not in case):
        found.append("converted to E2M1 by hardware, or not, unlike on this GPU")
    for kernel, instruction in NEVER_DENORMAL.items():
        ptx = ptx.replace(instruction, "") if case.startswith(kernel) else ptx
    if ".ftz" in ptx:
        found.append("denormal numbers flushed to zero")
    if ATOMIC.search(ptx):
        found.append("atomics, whose order changes from run to run")
    if case.startswith("decompose_k"):
        found += faults_of_a_product(case, ptx, launches, capability)
    loads = LOAD.findall(ptx)
    # By eight bytes, where a thread has no registers for more.
    is_wide = IS_HALF_WIDE if case.startswith(("nvfp4_cast", "nvfp4_amax", "nvfp4_weight")) else IS_WIDE
    wide = [load for load in loads if is_wide.search(load)]
    if not wide and " one " not in case:
        found.append(f"no wide loads: {sorted(set(loads))}")
    if casts and "factor" not in case and " one " not in case and len(wide) < len(loads):
        found.append(f"narrow loads: {sorted(set(loads) - set(wide))}")
    if case.startswith("rms_norm_backward") and " one " not in case and "launch" not in case:
        # By plan, rows of 16384 are not: they fill the SM as it is.
        if "cp.async" not in ptx and "16384 columns" not in case:
            found.append("nothing is loaded ahead")
    return [f"{case}: {fault}" for fault in found]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles(capability, tmp_path):
    compiled = compile_all(capability, tmp_path)
    assert {case.split()[0] for case in compiled} == {
        "mxnorm_cast", "cast", "norm_backward", "fold_backward", "rms_norm", "rms_norm_backward", "decompose_k",
        "nvfp4_norm", "nvfp4_cast", "nvfp4_amax", "nvfp4_weight",
    }  # fmt: skip
    assert [fault for case, result in compiled.items() for fault in faults(case, **result, capability=capability)] == []
