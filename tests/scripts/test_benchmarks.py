"""The benchmark scripts on a CPU: bytes, checks, tables. Kernels run in Triton's interpreter; nothing is timed."""

import argparse
import json
import math
from unittest import mock

import benchmarking
import cast as bench_cast
import kernel_benchmark
import norm as bench_norm
import norm_kinds
import pytest
import torch
import torch.nn as nn
import train as bench_train
from torchtitan.models.llama3.model.model import Transformer

PNG = b"\x89PNG\r\n"


class TestWriting:
    def test_table(self):
        rows = [{"name": "a", "us": 12.34, "n": 3}, {"name": "longer", "us": None}]
        assert benchmarking.table(rows, {"name": "<", "us": ".1f", "n": "d"}).splitlines() == [
            "name      us  n",
            "a       12.3  3",
            "longer     -  -",
        ]

    def test_json_writes_nan_and_infinity_as_strings(self, tmp_path):
        path = tmp_path / "new" / "a.json"
        benchmarking.write_json(path, {"loss": math.nan, "steps": (1, math.inf), "device": torch.device("cpu").type})
        assert json.loads(path.read_text()) == {"loss": "nan", "steps": [1, "inf"], "device": "cpu"}

    @pytest.mark.parametrize("panels", [{}, {"one": {"8x32": {"a": 1.0, "b": None}, "8x64": {"b": 2.0}}, "two": {}}])
    def test_plot(self, panels, tmp_path):
        path = tmp_path / "new" / "a.png"
        benchmarking.bar_plot(path, panels, "TB/s")
        assert path.read_bytes().startswith(PNG)


class TestKernels:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "gemm"),
            ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "gemm"),
            ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "gemm"),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
            ("void pytorch_flash::flash_bwd_kernel<cutlass::bfloat16_t>", "attention"),
            ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "optimizer"),
            ("triton_red_fused__to_copy_abs_amax_3", "inductor triton"),
            ("_cast_kernel", "mxtrain triton"),
            ("_cast_kernel_0", "mxtrain triton"),
            ("_cast_kernel_of_another", "other"),
            ("Memset (Device)", "other"),
        ],
    )
    def test_class(self, name, kind):
        assert benchmarking.kernel_class(name, {"_cast_kernel"}) == kind

    def test_summary_is_per_step(self):
        kernels = [("triton_a", 100.0), ("gemm", 400.0), ("triton_a", 300.0), ("gemm", 1200.0)]
        summary = benchmarking.summarise_kernels(kernels, steps=2, ours=(), top=1)
        assert summary["ms"] == 1.0
        assert summary["classes"] == [
            {"class": "gemm", "ms": 0.8, "%": 80.0},
            {"class": "inductor triton", "ms": 0.2, "%": 20.0},
        ]
        assert summary["kernels"] == [
            {"kernel": "gemm", "class": "gemm", "calls": 1.0, "us": 800.0, "ms": 0.8, "%": 80.0}
        ]
        assert benchmarking.table(summary["kernels"], benchmarking.KERNEL_COLUMNS)

    def test_a_marker_kernel_separates_runs(self):
        kernels = [("before", 9.0), ("cosh_kernel", 5.0), ("a", 1.0), ("b", 2.0), ("cosh_kernel", 5.0), ("a", 4.0)]
        assert benchmarking.split_runs(kernels, "cosh", 2) == [3.0, 4.0]
        for broken in (kernels[:-1], kernels[:4]):
            with pytest.raises(RuntimeError, match="1 of 2 runs"):
                benchmarking.split_runs(broken, "cosh", 2)


class TestKernelBenchmark:
    ARGS = argparse.Namespace(device="cpu", max_autotune=False, check=False)

    def measured(self, section, times, monkeypatch):
        """Rows of 1 x 25,000,000: one peer fails; the other peers and the kernel take these milliseconds."""
        monkeypatch.setattr(benchmarking, "copy_bandwidth", lambda milliseconds, moved: moved / 1e-4)
        times = iter(times)
        args = argparse.Namespace(**vars(self.ARGS), milliseconds=lambda run: next(times))
        return kernel_benchmark.measure_shape("norm", section, (1, 25_000_000), args, bandwidth=4e12)

    def entries(self, shape, device, max_autotune):
        def failing():
            raise RuntimeError("no such instruction")

        x = torch.zeros(shape, device=device)  # 100 MB, read and written by every run
        run = [lambda: x]
        return [
            kernel_benchmark.Entry("first", failing, (x,)),
            kernel_benchmark.Entry("second", lambda: run[0], (x,), lambda _: False),
            kernel_benchmark.Entry("third", lambda: run[0], (x,)),
            kernel_benchmark.ours("kernel", run[0], (x,), lambda _: True, ("first", "second", "third"))._replace(
                note=lambda: "4 warps"
            ),
        ]

    def test_ratios_and_summary(self, monkeypatch):
        section = kernel_benchmark.Section("a title", ((1, 25_000_000),), self.entries)
        failed, peer, other, kernel = self.measured(section, [0.4, 0.3, 0.2], monkeypatch)
        assert failed["check"] == "RuntimeError: no such instruction" and "us" not in failed
        assert peer["check"] == "differs" and peer["us"] == pytest.approx(400)
        assert kernel["peer"] == "second" and kernel["x peer"] == pytest.approx(2), "the first that ran"
        assert kernel["TB/s"] == pytest.approx(1) and kernel["of copy"] == pytest.approx(0.25)
        assert kernel["of same-size copy"] == pytest.approx(0.5), "the kernel takes 200 us, the copy 100"
        assert kernel["note"] == "4 warps" and "note" not in peer
        (line,) = kernel_benchmark.summarise([failed, peer, other, kernel])
        assert line["geomean"] == line["min"] == kernel["x peer"]
        assert line["min of copy"] == kernel["of copy"] and line["check"] == "ok"
        (line,) = kernel_benchmark.summarise([kernel], memory_bound=1e9)
        assert "min of copy" not in line

    def test_a_peer_that_cannot_run_says_why(self, capsys):
        def refuse():
            raise kernel_benchmark.NotRun("needs another GPU")

        row = kernel_benchmark.measure(kernel_benchmark.Entry("peer", refuse, ()), None, None)
        assert row == {"what": "peer", "ours": False, "check": "not run: needs another GPU"}
        assert capsys.readouterr().err == ""

    def test_the_fastest_peer_counts(self, monkeypatch):
        section = kernel_benchmark.Section("a title", ((1, 25_000_000),), self.entries, fastest=True)
        *_, kernel = self.measured(section, [0.4, 0.3, 0.2], monkeypatch)
        assert kernel["peer"] == "third" and kernel["x peer"] == pytest.approx(1.5)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of ``cast.py --check`` by name."""
    folder = tmp_path_factory.mktemp("check")
    torch.manual_seed(0)
    bench_cast.main(["--check", "--shapes", "64x96", "--json", f"{folder}/a.json", "--plot", f"{folder}/a.png"])
    assert (folder / "a.png").read_bytes().startswith(PNG)
    return {row["what"]: row for row in json.loads((folder / "a.json").read_text())["rows"]}


class TestCast:
    def test_bytes(self, rows):
        n, rho, gain = 64 * 96, 64 * 4, 96 * 4
        cast = n + n // 32
        expected = {
            "mxnorm_cast p=2 codes": 2 * n + cast + rho,
            "mxnorm_cast p=2 blocked": 2 * n + n + 128 * 4 + rho,  # scales are padded to whole tiles of 128 x 4
            "mxnorm_cast p=2 image": 2 * n + 2 * n + rho,
            "mxnorm_cast p=2 codes + residual": 3 * 2 * n + cast + rho,
            "norm_backward": 3 * 2 * n + rho,
            "cast (0, 1) codes": 2 * n + 2 * cast,
            "cast (0, 1) image": 3 * 2 * n,
            "cast bf16 x rho (0,) codes": 2 * n + rho + cast,
            "cast fp32 x rho (0,) image": 4 * n + rho + 2 * n,
            "cast W gain (0, 1) codes": 4 * n + gain + 2 * cast,
            "fold_backward": (2 + 4 + 4) * n + 2 * gain,
        }
        assert {name: rows[name]["MB"] for name in expected} == {name: count / 1e6 for name, count in expected.items()}

    def test_kernels_agree_with_the_reference(self, rows):
        checks = {name: row["check"] for name, row in rows.items()}
        assert checks == dict.fromkeys(checks, "ok")

    def test_a_wrong_bit_fails_the_check(self):
        y = torch.randn(32, 64)
        codes, scales = bench_cast.casts.cast(y, bench_cast.MXFP8, "rceil")
        assert bench_cast.is_cast((codes, scales), y, 1, "codes")
        codes.view(torch.uint8)[3, 5] ^= 1
        assert not bench_cast.is_cast((codes, scales), y, 1, "codes")
        rho = torch.rand(8) + 0.5
        assert bench_cast.cases.within_ulps(rho, rho.nextafter(torch.tensor(9.0)), 1)
        assert not bench_cast.cases.within_ulps(rho, rho * (1 + 2**-20), 2)
        assert bench_cast.is_rounding_apart(y.bfloat16(), y.bfloat16() * (1 + 2**-8))
        assert not bench_cast.is_rounding_apart(y.bfloat16(), y.bfloat16() * (1 + 2**-5))

    def test_torchaos_triton_casts_load_below_compute_capability_10(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(bench_cast, "_TORCHAO_KERNELS", [])
        with mock.patch("torch.utils._triton.has_triton", return_value=True):
            module = bench_cast.torchao_triton_kernels()
        assert len(module.to_mxfp8_dim0_kernel.configs) > 1 and len(module.to_mxfp8_dim1_kernel.configs) > 1
        assert callable(module.triton_to_mxfp8_dim0) and callable(module.triton_to_mxfp8_dim1)


@pytest.fixture(scope="module")
def norm_rows(tmp_path_factory):
    """Rows of ``norm.py --check`` by section."""
    folder = tmp_path_factory.mktemp("check")
    torch.manual_seed(0)
    status = bench_norm.main(
        ["--check", "--shapes", "64x96", "--json", f"{folder}/a.json", "--plot", f"{folder}/a.png"]
    )
    assert status == 0 and (folder / "a.png").read_bytes().startswith(PNG)
    return {row["section"]: row for row in json.loads((folder / "a.json").read_text())["rows"]}


class TestNorm:
    def test_rows(self, norm_rows):
        n, weight = 2 * 64 * 96, 2 * 96
        assert {name: row["MB"] * 1e6 for name, row in norm_rows.items()} == pytest.approx(
            {"forward": 2 * n + weight, "training": 2 * n + weight, "backward": 3 * n + 2 * weight}
        )
        for row in norm_rows.values():
            assert row["what"] == "mxtrain" and row["check"] == "ok" and row["note"].startswith("persistent ")

    @pytest.mark.parametrize("section", ["forward", "training", "backward"])
    def test_peers_are_complete_and_right(self, section, device, monkeypatch):
        """PyTorch's peers; compiled functions run uncompiled."""
        monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
        entries = bench_norm.sections()[section].entries((8, 96), device, True)
        by_name = {entry.name: entry for entry in entries if entry.name not in norm_kinds.RMS.peers}
        compiled = ["F.rms_norm, compiled", "F.rms_norm, max-autotune"]
        if section == "backward":
            compiled = ["formula, compiled", "formula, max-autotune", *compiled]
        peers = ["F.rms_norm", *compiled]
        assert list(by_name) == [*peers, "mxtrain"]
        assert set(by_name["mxtrain"].peers) == set(peers)
        moved = set()
        for name in [*compiled, *(["F.rms_norm"] if device == "cuda" or section != "backward" else [])]:
            run = by_name[name].make()
            for _ in range(2):  # a backward graph must survive its first run
                result = run()
            assert by_name[name].check(result), name
            if section != "backward":
                assert result.requires_grad == (section == "training")
            moved.add(kernel_benchmark.moved_bytes(by_name[name].reads, result))
        assert len(moved) == 1, "all peers count the same bytes"

    @pytest.mark.parametrize("section", ["forward", "backward"])
    def test_installed_packages_are_peers(self, section):
        def forward(x, weight):
            return lambda: norm_kinds.rms_norm_reference(x, weight)[0]

        def backward(dy, x, numbers, weight):
            return lambda: norm_kinds.rms_norm_backward_reference(dy, x, *numbers, weight)

        packages = {"here": ("json",), "gone": ("json", "no_such_package")}
        peers = {name: norm_kinds.Peer(needed, forward, backward) for name, needed in packages.items()}
        kind = norm_kinds.RMS._replace(peers=peers)
        *others, entry, kernel = bench_norm.sections(kind)[section].entries((8, 96), "cpu", False)
        assert entry.name == "here" and "gone" not in [other.name for other in others]
        assert entry.check(entry.make()()) and "here" in kernel.peers

    @pytest.mark.parametrize("section", ["training", "backward"])
    def test_a_wrong_result_fails_the_check(self, section):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        entry = bench_norm.sections()[section].entries((8, 96), device, False)[-1]
        run = entry.make()
        assert entry.check(run())
        for index, _ in enumerate(kernel_benchmark.tensors(run())):
            result = run()
            part = list(kernel_benchmark.tensors(result))[index]
            part.view(-1)[5] += 0.05 * part.abs().max()
            assert not entry.check(result)


class TestTrain:
    ARGS = ["--models", "tiny", "--device", "cpu", "--mode", "reference", "--warmup", "1", "--steps", "1"]

    def test_every_variant_trains(self, tmp_path, capsys, monkeypatch):
        """One run: all converters, a variant that fails, and the position of random bits in every step."""

        def fail(model, mode):
            raise ValueError("no such cast\nmore")

        set_rounding_step, steps = bench_train.mxtrain.set_rounding_step, []
        monkeypatch.setattr(
            bench_train.mxtrain, "set_rounding_step", lambda step: steps.append(step) or set_rounding_step(step)
        )
        monkeypatch.setitem(bench_train.VARIANTS, "mxnorm_p1", fail)
        monkeypatch.setattr(bench_train.gc, "collect", lambda: 0)  # takes half of the time
        files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
        variants = ["bf16", "mx_linear", "mxnorm", "mx_linear_nvfp4", "mxnorm_nvfp4", "mxnorm_mixed", "torchao"]
        assert bench_train.main([*self.ARGS, *files, "--variants", "mxnorm_p1", *variants]) == 1
        content = json.loads((tmp_path / "a.json").read_text())
        failed, *results = content["results"]
        assert failed["error"] == "ValueError: no such cast" and "loss" not in failed
        assert [row["variant"] for row in results] == variants
        assert content["settings"]["mode"] == "reference"
        losses = [row["loss"] for row in results]
        assert len(set(losses)) == len(variants), "every variant has its own numerics"
        assert max(losses) - min(losses) < 0.02, "all start from the same model and tokens"
        assert results[0]["x bf16"] == 1
        assert (tmp_path / "a.png").read_bytes().startswith(PNG)
        assert steps == [None] + [1, 2, 3, None] * len(variants), "first, warm-up and timed step; then reset"
        captured = capsys.readouterr()
        assert "x bf16" in captured.out and "tiny bf16: " in captured.out
        assert "tiny mxnorm_p1: ValueError: no such cast" in captured.out and "Traceback" in captured.err

    def test_repetitions_become_medians(self):
        bf16 = [{"tokens/s": rate, "first_step_s": 2.0, "loss": 1.0} for rate in (90.0, 200.0, 100.0)]
        mxnorm = [{"tokens/s": 50.0, "first_step_s": 3.0}, {"error": "out of memory"}, {"error": "later"}]
        base, row = bench_train.compare({("88m", "bf16"): bf16, ("88m", "mxnorm"): mxnorm})
        assert base["tokens/s"] == 100 and base["loss"] == 1 and "error" not in base
        assert (row["x bf16"], row["x first"], row["error"]) == (0.5, 1.5, "out of memory")
        assert "x torchao" not in row and "x GiB" not in row

    def test_torchao_replaces_every_linear_except_output(self):
        with torch.device("meta"):
            model = Transformer(bench_train.MODELS["tiny"].args)
        bench_train.convert_torchao(model)
        left = [fqn for fqn, module in model.named_modules() if type(module) is nn.Linear]
        assert left == ["output"]
