import platform
import re
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli
import torch

from mxtrain import cli
from mxtrain.cli import doctor
from mxtrain.formats.hardware import MODES, resolve_mode
from mxtrain.titan import converters
from tests.support.releases import only_022


def test_doctor_prints_versions_devices_and_modes(capsys):
    assert cli.main(["doctor"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    facts = {words[0]: words[1:] for words in lines}
    assert facts["python"] == [platform.python_version()]
    assert facts["torch"] == [version("torch")]
    assert "cpu" in facts and "cores," in facts["cpu"]
    assert all(facts[mode][0] in ("yes:", "no:") for mode in MODES) and facts["auto"][0] in MODES


@pytest.mark.parametrize("capability, mode", [((9, 0), "emulated"), ((10, 0), "native")])
def test_on_a_gpu_its_capability_decides_the_mode(monkeypatch, capsys, capability, mode):
    gpu = SimpleNamespace(name="NVIDIA H200", major=capability[0], minor=capability[1], total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu.name)
    major, minor = capability
    assert doctor.devices()[1:] == [
        (f"cuda:{index}", f"NVIDIA H200, compute capability {major}.{minor}, 141 GiB") for index in range(2)
    ]
    assert cli.main(["doctor"]) == 0
    assert f"  auto        {mode} on cuda, whatever the recipe\n" in capsys.readouterr().out


def test_a_gpu_that_pytorch_cannot_use_is_listed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "nvidia_gpus", lambda: ["NVIDIA H200"])
    ((device, text),) = doctor.devices()[1:]
    assert device == "unused" and text.startswith("NVIDIA H200: PyTorch ") and "sees no GPU" in text


@pytest.mark.parametrize("name, found", [("torch", "2.11.0"), ("torch", "2.13.0+cpu"), ("wandb", "0.1"),
                                         ("torch", "2.16.0"), ("torch", "2.10.1+cu126")])  # fmt: skip
def test_doctor_names_an_untested_version(name, found, monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: "0.2.2" if package == "torchtitan" else found)
    monkeypatch.setattr(doctor, "requires", lambda package: ["torch<2.16,>=2.11", 'pytest>=8; extra == "dev"'])
    advice = "; not tested beside torchtitan 0.2.2: pip install 'torch<2.16,>=2.11'"
    assert doctor.package_version(name) == found + advice * found.startswith(("2.16", "2.10"))


@pytest.mark.parametrize(
    "titan, torch_release, titan_says, torch_says",
    [
        ("0.2.2", "2.13.0+cpu", "0.2.2, which goes with torch<2.14,>=2.11", "2.13.0+cpu"),
        ("0.2.2", "2.14.1", "0.2.2, which goes with torch<2.14,>=2.11", "not tested beside torchtitan 0.2.2: "
         "pip install 'torch<2.14,>=2.11'"),
        ("0.3.0", "2.14.1", "0.3.0, which goes with torch<2.15,>=2.14", "2.14.1"),
        ("0.3.0", "2.13.0", "0.3.0, which goes with torch<2.15,>=2.14", "not tested beside torchtitan 0.3.0: "
         "pip install 'torch<2.15,>=2.14'"),
        ("0.3.1", "2.14.1", "not tested: pip install 'torchtitan==0.3.0'", "2.14.1"),
    ],
)  # fmt: skip
def test_doctor_and_a_run_name_versions_that_do_not_go_together(
    titan, torch_release, titan_says, torch_says, monkeypatch, capsys
):
    project = tomli.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [f'{text}; extra == "{extra}"' for extra in ("titan02", "titan03") for text in extras[extra]]
    found = {"torchtitan": titan, "torch": torch_release}
    monkeypatch.setattr(doctor, "requires", lambda package: [*project["dependencies"], *needed])
    monkeypatch.setattr(doctor, "version", lambda package: found.get(package) or version(package))
    warnings = ""
    for name, says in {"torch": torch_says, "torchtitan": titan_says}.items():
        if says.startswith("not tested"):
            says = f"{found[name]}; {says}"
            warnings += f"mxtrain: warning: {name} {says}\n"
        assert doctor.package_version(name) == says
    doctor.warn_of_untested_packages()
    assert capsys.readouterr().err == warnings


def test_a_missing_package_and_a_checkout_that_was_never_installed(monkeypatch):
    assert doctor.package_version("no-such-package-here") == "not installed"

    def not_installed(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "requires", not_installed)
    assert doctor.package_version("torch") == version("torch")


# --model

DEBUG = "train_configs/llama3_debug.toml"


def test_the_report_of_8b_and_its_flags(capsys):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    assert cli.main(["doctor", "--model", "train_configs/llama3_8b.toml", "--mxnorm.p", "1"]) == 0
    text = capsys.readouterr().out
    assert time.monotonic() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6, "KiB: no weight got memory"
    total, blocks, head = 8_030_261_248, 32 * 218_103_808, 128256 * 4096
    assert f"parameters               {total:,}\n" in text
    assert f"without embedding, head  {total - 2 * head:,}\n" in text
    assert f"; {blocks / (blocks + head):.1%} of the weights' multiplications".replace("%", " %") in text
    assert f"memory                   {16 * total / 2**30:,.1f} GiB of weights, gradients and AdamW states" in text
    assert "\n  layers.0-31.attention_norm: MXNorm, feeds wq, wk, wv\n" in text
    assert "\n  output: kept because it is the output head; " in text


def test_muon_keeps_one_state_of_a_matrix(capsys):
    assert cli.main(["doctor", "--model", "llama3_8b", "--model.converters=", "--optimizer.name=Muon"]) == 0
    gib = (16 * 8_030_261_248 - 4 * 32 * 218_103_808) / 2**30
    assert f"memory                   {gib:,.1f} GiB of weights, gradients and Muon states" in capsys.readouterr().out


SCHEDULE = ["--mxnorm.schedule", '{from_step = 3, modules = ["layers.0"], recipe = "wgrad=bf16"}']


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--model_args.n_layers=3", "--model.converters="], ["  memory      "]),
        (["--model.converters=fused_norm"], ["fused_norm: 13 norms swapped, 0 kept"]),
        pytest.param(["--model.converters=quantize.linear.mx"], ["quantize.linear.mx\n  left out here: not a con"],
                     marks=only_022),
        (["--mxnorm.mode=native"], ["mode reference: " if not torch.cuda.is_available() else "mode "]),
        (["--mxnorm.mode=fp8_merged", "--mxnorm.recipe=fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8"],
         ["mode fp8_merged: ", "\n  layers.0-5.attention.wo: dgrad multiplies images: its output gradients have"]),
        (SCHEDULE, ["precision schedule\n  steps 3 to 100: wgrad=bf16 in layers.0 (mxnorm.schedule[0])\n"]),
        (["--model_args.enable_weight_tying"], ["output: kept because it is the out"]),
        (["--parallelism.data_parallel_replicate_degree=2", "--training.dtype=bfloat16"], ["memory  "]),
    ],
)  # fmt: skip
def test_flags_decide(flags, expected, capsys):
    assert cli.main(["doctor", "--model", DEBUG, *flags]) == 0
    text = capsys.readouterr().out
    for words in expected:
        assert words in text


WHOLE = ["--parallelism.data_parallel_shard_degree=8", "--parallelism.expert_parallel_degree=1"]
ALONE = ["--parallelism.tensor_parallel_degree=1", "--parallelism.pipeline_parallel_degree=1"]


@pytest.mark.parametrize(
    "processes, words, over, plain, codes",
    [
        ("", ["llama3_8b"], "shards of whole tiles (NGPU is unset),", "58.9 (forward 14.96, backward 13.98, fp32 "
         "gradients 29.92)", "45.9 (forward 8.46, backward 7.49, "),
        ("64", ["llama3_70b", *ALONE], "64 shards,", "523.7 (forward 131.42, ", "398.8 (forward 68.98, "),
        # Tensor 8 x pipeline 2: a sixteenth. A pipeline's stages keep what they gathered.
        ("64", ["llama3_70b"], "4 shards, mean of the stages,", "24.6 (forward 8.21, backward 0.00, fp32 gradients "
         "16.43)", "20.7 (forward 4.23, backward 0.00, "),
        ("", ["deepseek_v3_16b", *WHOLE], "8 shards,", "116.6 (", "88.3 ("),
        # FSDP gathers no experts, and over twice as many processes an eighth.
        ("8", ["deepseek_v3_16b"], "8 shards,", "9.4 (forward 2.44, ", "7.9 (forward 1.69, "),
        ("", ["deepseek_v3_16b"], "8 shards, the fewest (NGPU is unset),", "9.4 (", "7.9 ("),
        ("16", ["deepseek_v3_16b"], "16 shards,", "22.8 (forward 5.79, ", "18.5 (forward 3.64, "),
        ("", ["llama3_8b", "--parallelism.data_parallel_shard_degree=1"], None, "", ""),
    ],
)  # fmt: skip
def test_bytes_of_fsdp_are_those_of_a_process(processes, words, over, plain, codes, monkeypatch, capsys):
    monkeypatch.setenv("NGPU", processes)
    assert cli.main(["doctor", "--model", *words, "--mxnorm.recipe=mxfp8_2d"]) == 0
    text = capsys.readouterr().out
    assert ("GiB that FSDP sends per process and local batch, " in text) == (over is not None)
    if over is not None:
        assert f"local batch, {over} by mxnorm.fsdp_gather\n" in text
        assert f"\n  high_precision  {plain}" in text and f"\n  quantized       {codes}" in text


def test_experts_are_counted_as_a_token_uses_them_and_multiply_images(capsys, monkeypatch):
    """Also on a machine whose GPU lacks the mode: a CPU has it."""
    monkeypatch.setattr(
        converters, "resolve_mode", lambda mode, device: resolve_mode(mode) if mode == "auto" else 1 / 0
    )
    arguments = ["doctor", "--model", "train_configs/qwen3_moe_debug.toml", "--mxnorm.mode", "fp8_merged"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "\n  layers.0-3.moe.experts: mode emulated: PyTorch has no grouped products with these scales\n" in text
    counts = {name: int(n.replace(",", "")) for name, n in re.findall(r"^  (\D+?)  +([\d,]+)$", text, re.M)}
    assert counts["used by one token"] == counts["parameters"] - 4 * 12 * 3 * 256 * 256


@pytest.mark.parametrize(
    "arguments, facts",
    [
        ([], ["--model needs a CONFIG"]),
        (["--mxnorm.p", "1"], ["--model needs a CONFIG"]),
        (["no.toml"], ["'no.toml' does not exist"]),
        ([DEBUG, "--mxnorm.mode=fp8_merged", "--mxnorm.recipe=nvfp4"],
         ["mxnorm.mode = 'fp8_merged' merges E4M3 codes", "which NVFP4 does not have"]),
        ([DEBUG, "--model_args.n_heads=3"], ["model_args.n_heads = 3", "dim = 256"]),
        ([DEBUG, "--mxnorm.filter_fqns=outputs"], ["mxnorm.filter_fqns", "'outputs'"]),
        ([DEBUG, "--parallelism.tensor_parallel_degree=3"], ["does not divide the 16 heads of llama3 debugmodel"]),
        pytest.param(
            [DEBUG, "--parallelism.context_parallel_degree=2", "--training.seq_len=96", "--validation.no-enable"],
            ["training.seq_len = 96", "128", "parallelism.context_parallel_degree = 2"], marks=only_022,
        ),
        ([DEBUG, "--model_args.enable_weight_tying", "--parallelism.pipeline_parallel_degree=2"],
         ["parallelism.pipeline_parallel_degree = 2 separates the embedding of llama3 debugmodel from the head"]),
    ],
)  # fmt: skip
def test_what_training_refuses_is_one_line(arguments, facts, capsys):
    assert cli.main(["doctor", "--model", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mxtrain: error: ") and error.count("\n") == 1
    for fact in facts:
        assert fact in error
