"""Compile a graph that launches kernels itself with Inductor for an H100, without a GPU.

    TRITON_INTERPRET=0 python -m tests.support.inductor_for_gpu

prints as JSON the kernels that Triton compiled from the code of a graph, calls of ops and fills of results in it, how
often PyTorch analyzed a kernel, limits of registers, whether calls and kernels are those without ``describe_launches``,
whether workers begin with these kernels, and the shapes of the tensors that another graph allocates.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch._dynamo import device_interface
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import async_compile
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from mxtrain.compile import passes
from mxtrain.compile.first_step import describe_launches, note_launches
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mx.cast import cast
from mxtrain.formats.nvfp4.norm import nvfp4_norm
from mxtrain.formats.nvfp4.weight_cast import nvfp4_weight
from mxtrain.formats.parse import get_recipe
from mxtrain.norms.kernels import row_norm, row_norm_backward
from tests.compile.test_launches import RECIPE, D, T, inputs, kernels_of_each_kind
from tests.support.graph_checks import draw

H100 = SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, max_threads_per_multi_processor=2048, warp_size=32,
    max_threads_per_block=1024, regs_per_multiprocessor=65536, L2_cache_size=50 << 20, total_memory=80 << 30,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10, gcnArchName="",
)  # fmt: skip
ESTIMATE = RMSEstimate.for_recipe(get_recipe("nvfp4").fprop)


def pretend_gpu() -> None:
    cuda, interface = torch.cuda, device_interface.CudaInterface
    cuda.is_available = interface.is_available = lambda: True
    cuda.current_device = interface.current_device = lambda: 0
    cuda.get_device_capability, interface.get_compute_capability = lambda *_: (9, 0), lambda *_: 90
    cuda.get_device_properties = interface.get_device_properties = lambda *_: H100
    interface.Worker.get_device_properties = staticmethod(lambda *_: H100)
    fake_tensor.init_gpu_context = triton_helpers.set_driver_to_gpu = lambda *_: None
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    has_triton.cache_clear()
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))


def kernels(x, w, gain):
    """Those of ``kernels_of_each_kind``, and others with numbers that are not integers or with padded scales."""
    y, mean, rstd, total = row_norm(x, gain, gain, 1e-5, x, True)
    scale = gain.max()
    results = [y, mean, *row_norm_backward(y, total, mean, rstd, gain, None, torch.float32, torch.float32)]
    results += [*nvfp4_norm(x, ESTIMATE, 0.5, "blocked"), *nvfp4_weight([w], [scale], "blocked", gain)[1]]
    return [*kernels_of_each_kind(x, w, gain), *(result for result in results if result is not None)]


def two_casts(x, weight):
    """Two kernels that read a tensor that Inductor computes."""
    shape = 2, T // 2, D
    y = (x.view(shape).float().sigmoid() * (x @ weight).view(shape)).bfloat16().view(T, D)
    return [each.data for dims in ((1,), (0,)) for each in cast(y, RECIPE, dims, "image").values()]


def code_of(function, *arguments) -> str:
    """What Inductor generates for a function of GPU tensors like ``arguments``."""
    with fake_tensor.FakeTensorMode() as mode:
        fakes = [torch.empty(each.shape, dtype=each.dtype, device="cuda") for each in arguments]
        module = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
    module.graph.eliminate_dead_code()
    note_launches(module.graph)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        post_grad_passes(module, False)
        module.recompile()
        graph = GraphLowering(module, example_inputs=fakes, is_inference=True)
        with V.set_graph_handler(graph):
            graph.run(*fakes)
            code = graph.codegen()[0]
    return getattr(code, "value", code)


@contextmanager
def kept_kernels() -> Iterator[list[tuple[str, str]]]:
    """Name and source of the kernels that PyTorch would compile and that are not Inductor's own."""
    found = []

    def keep(_, name: str, source: str, **options) -> None:
        if "user_autotune" in source:
            found.append((name, source))

    with patch.object(async_compile.AsyncCompile, "triton", keep):
        yield found


def sources_in(code: str) -> list[tuple[str, str]]:
    with kept_kernels() as found, patch.object(async_compile.AsyncCompile, "wait", lambda *_: None):
        exec(code, {"__name__": "generated"})
    return found


def kinds(sources: list[tuple[str, str]]) -> set[str]:
    """The sources without the names that kernels have in a graph."""
    return {re.sub(r"'kernel_name': '\w+'", "", source) for _, source in sources}


def compile_kernels(sources: list[tuple[str, str]]) -> list[str]:
    """Compile Triton kernels, and return the names of those that C++ launches."""
    compiled = []
    for name, source in sources:
        kernel = async_compile._load_triton_kernel_from_source(name, source)
        kernel._precompile_worker()
        compiled += [name for result in kernel.compile_results if isinstance(result, StaticTritonCompileResult)]
    return compiled


def calls_in(code: str) -> str:
    """A graph's code behind its kernels, with buffers numbered as they appear and no numbers of kernels."""
    numbers = {}
    calls = re.sub(r"(?<=kernel)_\d+|#.*", "", code.partition("async_compile.wait(globals())")[2])
    return re.sub(r"\bbuf\d+", lambda match: str(numbers.setdefault(match[0], len(numbers))), calls)


def shapes_allocated(code: str) -> list[str]:
    return sorted(re.findall(r"= empty_strided_cuda\(\((.*?)\)", code))


def main() -> None:
    pretend_gpu()
    passes.install()
    wrap = triton_kernel_wrap
    with (
        patch.object(wrap, "generate_ttir", wraps=wrap.generate_ttir) as analyzed,
        patch.object(async_compile.AsyncCompile, "use_process_pool", lambda *_: True),
        kept_kernels() as begun,
    ):
        code = code_of(kernels, *inputs())
    describe_launches(False)
    plain = code_of(kernels, *inputs())
    describe_launches(True)
    matrices = draw(T, D, seed=0).bfloat16(), draw(D, D, seed=1).bfloat16()
    sources = sources_in(code)
    found = {
        "compiled": compile_kernels(sources),
        "unwanted": re.findall(r"torch\.ops\.mxtrain\.\w+|triton_poi_fused_empty_\d+", code),
        "analyses": analyzed.call_count,
        "registers": re.findall(r"'maxnreg': (\d+)", code),
        "same_calls": calls_in(code) == calls_in(plain),
        "same_kernels": kinds(sources) == kinds(sources_in(plain)),
        "begun": kinds(begun) == kinds(sources),
        "allocated": shapes_allocated(code_of(two_casts, *matrices)),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
