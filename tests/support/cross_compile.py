"""Compile kernels for one GPU architecture, without a GPU, and print the results as JSON.

    TRITON_INTERPRET=0 python cross_compile.py 90 all

prints {case: {"ptx": ..., "cubin_bytes": ..., "fits": ..., "launches": ..., "prepared": ...}}. "fits" says whether a
program's shared memory fits on the GPU, "launches" how many launches the call makes, and "prepared" whether this launch
may start before the one ahead of it ends. The public functions are called on fake CUDA tensors, so each kernel is
compiled for the arguments, tile sizes and warps of a launch on this architecture. The script needs a process of its
own: kernels that were defined for the interpreter cannot be compiled.
"""

import itertools
import json
import sys
from functools import partial

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mxtrain.formats.cast_kernels import FORMS, MERGED_FORMS
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mx.cast import cast, cast_tiles
from mxtrain.formats.mx.decode import decode_launch
from mxtrain.formats.mx.norm import mxnorm_cast
from mxtrain.formats.mx.swiglu_cast import swiglu_backward_cast, swiglu_cast
from mxtrain.formats.nvfp4.cast import nvfp4_cast
from mxtrain.formats.nvfp4.norm import nvfp4_norm, nvfp4_rows
from mxtrain.formats.nvfp4.tensor_scale import nvfp4_tensor_scales
from mxtrain.formats.nvfp4.weight_cast import nvfp4_weight
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.recipe import RECIPES
from mxtrain.launch import launch as launching
from mxtrain.launch.launch import Launch, as_sequence, implementations
from mxtrain.nn.decompose_k.kernels import Plan, decompose_k_by_plan, kernel_plan, ranges
from mxtrain.norms.kernels import row_norm, row_norm_backward
from mxtrain.norms.mxnorm_backward import fold_backward, norm_backward

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
ROWS, LOOPED = 512, 20480
# Bytes of shared memory per program, by compute capability (CUDA C++ Programming Guide).
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
launches: list[Launch] = []  # of the last call


def few(found: dict) -> dict:
    """The first case of every kernel and form."""
    forms, chosen = ("codes", "blocked", "image", "merged", "gradient", "few", "unsplit", "dtotal"), {}
    for name, call in found.items():
        chosen.setdefault((name.split()[0], *(form in name for form in forms)), (name, call))
    return dict(chosen.values())


def cases(everything: bool) -> dict:
    """Name -> call of a public function, with each value of every setting that changes the generated code.

    ``everything`` adds what is the same arithmetic on every architecture: other widths, estimators and factors.
    """
    rceil, floor = get_recipe("mxfp8"), get_recipe("mxfp8", scale_rounding="floor")
    found = {}

    def matrix(dtype, columns=4096, rows=ROWS):
        return torch.empty(rows, columns, dtype=dtype, device="cuda")

    def vector(length, dtype=torch.float32):
        return torch.empty(length, dtype=dtype, device="cuda")

    def add_norm(name, x, recipe=rceil, form="codes", p=2, estimator="pre_round", residual=None):
        estimate = RMSEstimate.for_recipe(recipe, p, estimator)
        found[f"mxnorm_cast {name}"] = lambda: mxnorm_cast(x, estimate, recipe, form, residual)

    def add_cast(name, x, recipe=rceil, dims=(1,), form="codes", **factors):
        found[f"cast {name}"] = lambda: cast(x, recipe, dims, form, **factors)

    for name, form in (*itertools.product(["bf16"], FORMS), ("fp32", "codes")):
        add_norm(f"{name} {form}", matrix(DTYPES[name]), form=form)
        add_cast(f"{name} {form}", matrix(DTYPES[name]), dims=(1, 0), form=form)
    bf16 = torch.bfloat16
    for columns in (96, 768, 16384, LOOPED) if everything else (LOOPED,):
        add_norm(f"bf16 {columns} columns", matrix(bf16, columns), form="image")
    if everything:
        for p, estimator, columns in ((1, "pre_round", 4096), (2, "post_round", LOOPED), (2, "exact", 4096)):
            add_norm(f"bf16 p={p} {estimator}", matrix(bf16, columns), form="image", p=p, estimator=estimator)
        add_norm("bf16 floor post_round", matrix(bf16), recipe=floor, estimator="post_round")
        add_norm("bf16 residual", matrix(bf16), residual=matrix(bf16))
        add_cast("bf16 e5m2", matrix(bf16), recipe=RECIPES["mxfp8_e5m2"].of_gradients, dims=(1, 0), form="image")
        for form in ("codes", "image"):
            add_cast(f"bf16 e2m1 {form}", matrix(bf16), RECIPES["mxfp4"], (1, 0), form, hadamard=True)
            add_norm(f"bf16 e2m1 {form}", matrix(bf16), RECIPES["mxfp4"], form)
    add_norm("bf16 floor", matrix(bf16), recipe=floor)
    add_norm("bf16 residual looped", matrix(bf16, LOOPED), form="blocked", residual=matrix(bf16, LOOPED))
    add_cast("bf16 floor", matrix(bf16), recipe=floor, dims=(1, 0), form="image")
    add_cast("bf16 row factor", matrix(bf16), dims=(0,), form="image", row_factor=vector(ROWS))
    add_cast("bf16 column factor", matrix(bf16), dims=(1, 0), form="blocked", column_factor=vector(4096, bf16))
    add_cast("bf16 source", matrix(bf16), dims=(1, 0), form="image", source=vector(ROWS, torch.int64))
    found["cast fp32 to bf16 image"] = lambda: torch.ops.mxtrain.cast(
        [matrix(torch.float32)], 0, None, None, None, True, 1, False, True, True, "e4m3", "rceil", "image"
    )
    for form in ("blocked", "image"):
        found[f"cast joined {form}"] = lambda form=form: cast([matrix(bf16), matrix(bf16)], rceil, (1, 0), form, axis=1)
        found[f"cast experts {form}"] = lambda form=form: cast([matrix(bf16)] * 2, rceil, (1, 0), form, experts=4)
    for name, form in itertools.product(DTYPES, ("blocked", "image")):
        w = matrix(DTYPES[name])
        found[f"cast tiles {name} {form}"] = lambda form=form, w=w: cast_tiles([w], rceil, form=form)
        found[f"decode_tiles {name} image"] = lambda w=w: decode(w)
    for form in MERGED_FORMS:
        add_cast(f"bf16 {form}", matrix(bf16), dims=(1, 0), form=form)
    add_cast("bf16 row factor merged_input", matrix(bf16), dims=(0,), form="merged_input", row_factor=vector(ROWS))
    found["cast tiles bf16 merged_weight"] = lambda: cast_tiles([matrix(bf16)], rceil, form="merged_weight")
    add_norm("bf16 merged_input", matrix(bf16), form="merged_input")
    if everything:
        add_norm("bf16 640 columns merged_input", matrix(bf16, 640), form="merged_input", residual=matrix(bf16, 640))
        add_norm("bf16 looped merged_input", matrix(bf16, LOOPED), form="merged_input")
        for form in ("merged_input", "merged_gradient"):
            add_cast(f"bf16 rows {form}", matrix(bf16), form=form)
            add_cast(f"bf16 columns {form}", matrix(bf16), dims=(0,), form=form)
    x = matrix(bf16)
    found["swiglu_cast bf16 merged_input"] = lambda x=x: swiglu_cast(x, x, True, False, "e4m3", "rceil", "merged_input")
    found["swiglu_backward_cast bf16 merged"] = lambda x=x: swiglu_backward_cast(
        x, x, x, True, False, False, False, "e4m3", "e4m3", "rceil", "merged_gradient"
    )
    for form in ("image", "blocked") if everything else ():
        x, wide = matrix(bf16), matrix(bf16, 8192)
        found[f"swiglu_cast halves {form}"] = lambda form=form, w=wide: swiglu_cast(
            *w.chunk(2, 1), True, True, "e4m3", "rceil", form
        )
        found[f"swiglu_backward_cast bf16 joined {form}"] = lambda form=form, x=x: swiglu_backward_cast(
            x, x, x, True, True, True, True, "e4m3", "e5m2", "rceil", form
        )
    x = matrix(bf16)
    found["swiglu_cast bf16 image"] = lambda x=x: swiglu_cast(x, x, True, False, "e4m3", "rceil", "image")
    for form in ("image", "blocked"):
        found[f"swiglu_backward_cast bf16 {form}"] = lambda form=form, x=x: swiglu_backward_cast(
            x, x, x, True, True, True, False, "e4m3", "e4m3", "rceil", form
        )
    for name, dtype in DTYPES.items():
        x, rho, gain = matrix(dtype), vector(ROWS), vector(4096, dtype)
        found[f"norm_backward {name}"] = lambda x=x, rho=rho: norm_backward(x, x, rho)
        long = matrix(dtype, LOOPED)
        found[f"norm_backward {name} looped"] = lambda x=long, rho=rho: norm_backward(x, x, rho)
        found[f"fold_backward {name}"] = lambda x=x, gain=gain: fold_backward(x, x, gain)
    widths = {"bf16": (768, 4096, 16384, LOOPED), "fp32": (4096, 16384, LOOPED), "fp16": (4096,)}
    for name, dtype in {**DTYPES, "fp16": torch.float16}.items():
        for columns in widths[name] if everything else widths[name][-2:]:
            rows = 2**25 // columns
            x, rstd, weight = matrix(dtype, columns, rows), vector(rows), vector(columns, dtype)
            case = f"{name} {columns} columns"
            add_row_norms(found, case, x, rstd, weight)
    for columns in (4096, LOOPED) if everything else ():
        x, rstd, weight = matrix(bf16, columns), vector(ROWS), vector(columns, bf16)
        add_row_norms(found, f"{columns} residual, dtotal", x, rstd, weight, x)
        add_row_norms(found, f"{columns} no weight", x, rstd, None, dbias=bf16)
    # These cases fill the shared memory.
    x, rstd, weight = matrix(torch.float32, 8192), vector(ROWS), vector(8192)
    add_row_norms(found, "fp32 dtotal", x, rstd, weight, x)
    add_products(found)
    add_nvfp4(found, matrix, vector, everything)
    # Triton turns a count of one into a constant.
    one = matrix(bf16, 32, rows=1)
    add_norm("one block", one)
    add_cast("one block", one, dims=(1, 0), form="blocked", row_factor=vector(1), column_factor=vector(32))
    element = matrix(bf16, 1, rows=1)
    add_cast("one element", element, dims=(0,), column_factor=vector(1))
    add_cast("one element row factor", element, dims=(0,), row_factor=vector(1), column_factor=vector(1))
    found["swiglu_backward_cast one block"] = lambda: swiglu_backward_cast(
        one, one, one, True, True, False, False, "e4m3", "e4m3", "rceil", "codes"
    )
    found["norm_backward one element"] = lambda: norm_backward(element, element, vector(1))
    add_row_norms(found, "one element", element, vector(1), vector(1))
    found["fold_backward one row"] = lambda: fold_backward(one, one, vector(32))
    return found


def decode(values: torch.Tensor) -> None:
    rows, columns = values.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty(rows // 32, columns // 32, dtype=torch.uint8, device="cuda")
    launches.append(decode_launch(codes, scales, values))


def add_row_norms(found: dict, case: str, x, rstd, weight, residual=None, dbias=None) -> None:
    """Add both norms, forward and backward. Without a weight LayerNorm's bias is left alone."""
    dweight = None if weight is None else weight.dtype
    bias = torch.empty(x.shape[1], dtype=dbias or dweight, device="cuda")
    for centered, name in ((False, "rms_norm"), (True, "layer_norm")):
        mean, dtypes = (rstd, (dweight, bias.dtype)) if centered else (None, (dweight, None))
        args = x, weight, bias if centered else None, 1e-5, residual, centered
        gradients = x, x, mean, rstd, weight, residual, *dtypes
        found[f"{name} {case}"] = lambda args=args: row_norm(*args)
        found[f"{name}_backward {case}"] = lambda gradients=gradients: row_norm_backward(*gradients)


def add_nvfp4(found: dict, matrix, vector, everything: bool) -> None:
    """Add the casts to NVFP4, with every form, rounding, transform and factor."""
    bf16 = torch.bfloat16
    scale, scales, number = vector((1, 1)), vector((1, 2)), vector((), torch.int64)

    def add(name, function, *args, **kwargs):
        found[f"{function.__name__} {name}"] = lambda: function(*args, **kwargs)

    def estimate(p=2, estimator="pre_round"):
        return RMSEstimate(p, estimator, 1e-5, 16)

    for name, form in (*itertools.product(["bf16"], FORMS), ("fp32", "codes")):
        x = matrix(DTYPES[name])
        add(f"{name} {form}", nvfp4_norm, x, estimate(), 2.0**-8, form)
        add(f"{name} {form}", nvfp4_rows, x, None, form)
        add(f"{name} {form}", nvfp4_weight, [x], [scale], form)
    draws = vector(4, torch.int64)
    gradient = dict(signs=number, draws=[draws])
    x = matrix(bf16)
    add("bf16 codes gradient", nvfp4_cast, [x], scales, "codes", **gradient)
    for columns in (112, 768, 16384, LOOPED) if everything else (LOOPED,):
        add(f"bf16 {columns} columns", nvfp4_norm, matrix(bf16, columns), estimate(), 2.0**-8, "image")
    if everything:
        add("bf16 p=1", nvfp4_norm, x, estimate(1), 2.0**-8, "image")
        add("bf16 exact", nvfp4_norm, x, estimate(2, "exact"), 2.0**-8, "image")
        add("bf16 exact codes", nvfp4_norm, x, estimate(2, "exact"), 2.0**-8)
        add("bf16 codes residual", nvfp4_norm, x, estimate(), 2.0**-8, "codes", x)
        add("bf16 codes scales of rows", nvfp4_norm, x, estimate(), None, "codes", x)
        add("bf16 image given scales of rows", nvfp4_rows, x, vector(ROWS), "image")
        add(f"bf16 {LOOPED} columns", nvfp4_rows, matrix(bf16, LOOPED), None, "blocked")
        add("bf16 stochastic (1,)", nvfp4_cast, [x], scale, "image", (1,), draws=[draws])
        add("bf16 column factor", nvfp4_weight, [x], [scale], "image", vector(4096, bf16))
    for error, form in itertools.product(("mae", "mse"), ("image", "codes")) if everything else ():
        name = f"bf16 four over six {error} {form}"
        add(name, nvfp4_norm, x, estimate(), None, form, error=error)
        add(name, nvfp4_weight, [x], [scale], form, error=error)
        add(name, nvfp4_cast, [x], scales, form, signs=number, error=error)
    # These rows are held as three parts.
    add("bf16 3072 columns codes", nvfp4_norm, matrix(bf16, 3072), estimate(), 2.0**-8, "codes")
    rows, columns = vector(ROWS), vector(4096, bf16)
    add("bf16 row factor", nvfp4_cast, [x], scales, "image", (0,), signs=number, row_factor=rows)
    add("bf16 blocked column factor", nvfp4_cast, [x], scale, "blocked", column_factor=columns)
    if everything:  # random bits take seconds to compile
        strip, two = matrix(bf16, 32, rows=16), vector((2, 2))
        add("one strip gradient", nvfp4_cast, [strip, strip], two, "image", axis=1, signs=number, draws=[draws, draws])
    add("bf16", nvfp4_tensor_scales, [x])
    add("bf16 transformed", nvfp4_tensor_scales, [x], number)
    add("bf16 transformed row factor", nvfp4_tensor_scales, [x], number, rows)
    one = matrix(bf16, 16, rows=1)
    add("one block codes", nvfp4_norm, one, estimate(), 2.0**-8)
    add("one block", nvfp4_tensor_scales, [one], number)
    ends = vector(60, torch.int32)
    if everything:
        of_groups = dict(signs=number, draws=[vector((60, 4), torch.int64)], ends=ends)
        add("bf16 groups gradient", nvfp4_cast, [x], vector((60, 2)), "image", **of_groups)
    add("bf16 groups", nvfp4_weight, [x], [vector((60, 1))], "image", ends=ends)
    add("bf16 groups", nvfp4_tensor_scales, [x], number, ends=ends)


def add_products(found: dict) -> None:
    """Add products of tokens with a router's weight, and gradients, with the plans for a GPU of 132 SMs."""
    two, wide = Plan(8, 16, 32, 128, 2, 4), Plan(4, 64, 64, 64, 4, 3)
    bf16 = torch.bfloat16

    def add(name, shape, dtype=bf16, plan=None, epilogue=None, out_dtype=torch.float32, gradient=False):
        m, n, k = shape
        plan = plan or kernel_plan(*ranges(m, n, k), True, dtype.itemsize, shared=launching.H100_SHARED_MEMORY)

        def call():
            # Stored as [tokens, hidden] and [experts, hidden]; for a gradient, [tokens, experts] and [tokens, hidden].
            stored = ((k, m), (k, n)) if gradient else ((m, k), (n, k))
            a, b = (torch.empty(shape, dtype=dtype, device="cuda") for shape in stored)
            a, b = (a.t(), b) if gradient else (a, b.t())
            bias = torch.empty(n, device="cuda") if epilogue else None
            launches.extend(decompose_k_by_plan(a, b, bias, epilogue, out_dtype, plan)[1])

        found[f"decompose_k {name}"] = call

    for tokens in (16, 64, 256):
        add(f"{tokens} tokens", (tokens, 256, 7168))
    add("8192 tokens, unsplit", (8192, 64, 2048))
    add("few tokens: one", (1, 256, 7168))
    for epilogue in ("relu", "sigmoid"):
        add(epilogue, (16, 64, 8192), plan=two, epilogue=epilogue, out_dtype=bf16)
    add("fp32", (16, 64, 8192), torch.float32, two._replace(block_k=64))
    add("fp16", (16, 64, 8192), torch.float16, two)
    add("gradient", (16, 5120, 8192), plan=two, gradient=True)
    add("softmax", (16, 256, 7168), plan=two, epilogue="softmax")
    add("softmax, unsplit", (16, 32, 7168), plan=two._replace(splits=1), epilogue="softmax")
    add("few tokens: three, fp32", (3, 64, 2048), torch.float32, epilogue="sigmoid")
    add("few tokens: two by two", (16, 128, 2880))
    add("large tiles gradient", (256, 5120, 8192), plan=wide, gradient=True)
    add("sigmoid, unsplit", (8192, 64, 2048), plan=wide._replace(splits=1), epilogue="sigmoid")
    add("K cut off", (64, 256, 2880), plan=wide._replace(block_k=128))
    add("few tokens: one, and one expert", (1, 1, 1))


def record(implementation, *args):
    results, of_call = implementation(*args)
    launches.extend(as_sequence(of_call))
    return results, of_call


def source_and_options(launch: Launch) -> tuple[ASTSource, dict]:
    """Return the source and options that Triton compiles for a launch.

    1 and None become constants, and multiples of 16 are marked as such, except for arguments that the kernel lists
    under ``do_not_specialize``.
    """
    names = launch.kernel.arg_names
    values = dict(zip(names, launch.args)) | {k: v for k, v in launch.constants.items() if k in names}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(names):
        value, unspecialized = values[name], launch.kernel.params[i].do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float) and name not in launch.constants:
            signature[name] = "fp32"
        elif isinstance(value, int) and (value != 1 or unspecialized) and name not in launch.constants:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not unspecialized:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[(i,)] = value
    options = {k: v for k, v in launch.keywords.items() if k not in names}
    return ASTSource(launch.kernel, signature, constants, attributes), options


def main(capability: int, everything: bool) -> None:
    for op, implementation in implementations.items():
        implementations[op] = partial(record, implementation)
    torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)
    launching.H100_SHARED_MEMORY = SHARED_MEMORY[capability]
    results = {}
    with FakeTensorMode():
        found = cases(everything)
        for name, call in (found if everything else few(found)).items():
            if "blocked" in name and capability < 100:  # scales in the layout of tensor cores that this GPU lacks
                continue
            if "decode" in name and capability < 89:  # which converts no E4M3, and decodes by PyTorch
                continue
            launches.clear()
            call()
            assert launches, name
            for count, launch in enumerate(launches, 1):
                source, options = source_and_options(launch)
                compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
                case = name if count == 1 else f"{name}, launch {count}"
                results[case] = {
                    "ptx": compiled.asm["ptx"],
                    "cubin_bytes": len(compiled.asm["cubin"]),
                    "fits": compiled.metadata.shared <= SHARED_MEMORY[capability],
                    "launches": len(launches),
                    "prepared": compiled.metadata.launch_pdl,
                }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), everything=sys.argv[2] == "all")
