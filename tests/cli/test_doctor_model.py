"""``mxtrain doctor --model``: its figures against a model with memory; tests/titan/v02 has its shards."""

import re
import resource
import time

import pytest
import torch

from mxtrain import ConfigError, cli
from mxtrain.cli import doctor_model
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.read import read_settings
from mxtrain.titan.check_job import check_model_layout
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.releases import RELEASE, engine
from tests.support.releases import only_022

GIB = 2**30
DEBUG = "train_configs/llama3_debug.toml"
PIPELINE_2 = "--parallelism.pipeline_parallel_degree=2"
TENSOR_2 = "--parallelism.tensor_parallel_degree=2"
LARGE = "--job.config_file=train_configs/llama3_70b.toml"


def rows_of(text):
    """GPUs -> the figures of its row, in GiB: weights, gradients, optimizer, gathered, sum."""
    lines = [line.rsplit(maxsplit=5) for line in text.splitlines()]
    return {
        line[0].strip(): [float(figure.replace(",", "")) for figure in line[1:]]
        for line in lines
        if len(line) == 6 and re.fullmatch(r"[\d,]+\.\d\d", line[-1])
    }


def memory(*arguments):
    job_config = parse_job_config([*arguments])
    return doctor_model.memory_table(engine().build_on_meta(job_config), job_config)


def measured(model):
    """Bytes of weights, gradients and optimizer states of a model, after a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(16)[None]
    model(tokens).float().logsumexp(-1).mean().backward()
    optimizer.step()
    states = [v for state in optimizer.state.values() for name, v in state.items() if name != "step"]
    tensors = list(model.parameters()), [p.grad for p in model.parameters()], states
    return [sum(tensor.nbytes for tensor in each) for each in tensors]


@pytest.mark.parametrize("flags", [[], ["--training.dtype=bfloat16"], ["--model_args.enable_weight_tying"]])
def test_memory_of_one_process_is_what_a_step_takes(flags):
    job_config = parse_job_config(["--model.flavor=debugmodel", "--training.seq_len=64", *flags])
    real = engine().SizedModel.of_job(job_config).on_meta()
    real = real.to_empty(device="cpu").to(getattr(torch, job_config.training.dtype))
    with torch.no_grad():
        real.init_weights()
    weights, gradients, states = measured(real)
    on_meta = engine().build_on_meta(job_config)
    assert doctor_model.shard_bytes(on_meta, 1, getattr(torch, job_config.training.dtype)) == weights == gradients
    assert doctor_model.OPTIMIZER_STATES * weights == states
    (groups,) = doctor_model.groups_of_ranks(on_meta, job_config.parallelism)
    gathered = [id(weight) for group in groups for weight in group.parameters()]
    assert len(gathered) == len(set(gathered)) == len(list(real.parameters())) - 1, "all but the last norm's"
    assert dict(doctor_model.parameters(on_meta))["parameters"] == f"{sum(p.numel() for p in real.parameters()):,}"


def test_the_report_of_8b_and_its_flags(capsys):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    assert cli.main(["doctor", "--model", "train_configs/llama3_8b.toml", "--mxnorm.p", "1"]) == 0
    text = capsys.readouterr().out
    assert time.monotonic() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6, "KiB: no weight got memory"
    total, blocks, head = 8_030_261_248, 32 * 218_103_808, 128256 * 4096
    assert f"parameters               {total:,}\n" in text
    assert f"without embedding, head  {total - 2 * head:,}\n" in text
    assert f"low precision  {blocks:,} ({blocks / (blocks + head):.1%})" in text
    assert f"high           {head:,} (" in text and f"all            {blocks + head:,};" in text
    weights, gathered = 4 * total / GIB, 2 * 2 * head / GIB if RELEASE == "v03" else 0
    row = [weights, weights, 2 * weights, gathered, 4 * weights + gathered]
    assert rows_of(text)["1"] == pytest.approx(row, abs=0.006)
    assert rows_of(text)["64"][0] == pytest.approx(weights / 64, abs=0.006)
    assert rows_of(text)["64"][3] == pytest.approx(2 * 2 * head / GIB, abs=0.006), "embedding and head in bf16"
    assert "32 x  layers.*.attention_norm -> layers.*.attention.wq, layers.*.attention.wk, layers.*.attention" in text
    assert "1 x  kept: output: is the output head" in text


SCHEDULE = ["--mxnorm.schedule", '{from_step = 3, modules = ["layers.0"], recipe = "wgrad=bf16"}']


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--model_args.n_layers=3", "--model.converters="], ["  high           ", "low precision  0 (0.0%)"]),
        (["--model.converters=fused_norm"], ["fused_norm: 13 norms swapped, 0 kept"]),
        pytest.param(["--model.converters=quantize.linear.mx"], ["quantize.linear.mx\n  left out here: not a con"],
                     marks=only_022),
        (["--mxnorm.mode=native"], ["mode reference on cpu" if not torch.cuda.is_available() else "mode "]),
        (SCHEDULE, ["precision schedule\n  steps 3 to 100: wgrad=bf16 in layers.0 (mxnorm.schedule[0])\n"]),
        (["--training.enable_cpu_offload", TENSOR_2],
         ["\n  gathered: the two largest groups of weights, in float32\n  left out: gathered gradients, act",
          "all but the gathered weights is in the CPU's memory", "leaves whole (gates, DeepSeek's wkv_a, wq_a) c"]),
    ],
)  # fmt: skip
def test_flags_decide(flags, expected, capsys):
    assert cli.main(["doctor", "--model", DEBUG, *flags]) == 0
    text = capsys.readouterr().out
    for words in expected:
        assert words in text


@pytest.mark.parametrize(
    "replicas, shards, names", [(2, 4, ["8 (2 x 4)"]), (4, 1, ["4 (4 x 1)"]), (2, -1, ["2 (2 x 1)", "4 (2 x 2)"])]
)
def test_layouts_are_those_that_the_degrees_allow(replicas, shards, names):
    degrees = {"replicate": replicas, "shard": shards}
    flags = [f"--parallelism.data_parallel_{kind}_degree={degree}" for kind, degree in degrees.items()]
    rows = rows_of(memory(f"--job.config_file={DEBUG}", *flags, "--training.global_batch_size=-1"))
    assert list(rows)[:2] == names


def test_the_layout_of_70b_fits_64_gpus_of_80_gb():
    """Every rank of the pipeline has 40 layers, and the embedding or the head. Norms are not divided by 8."""
    settings = read_settings([LARGE])
    check_machine(settings, Machine(64, has_gpus=True))
    check_model_layout(settings)
    with pytest.raises(ConfigError, match="tensor_parallel_degree = 8 does not fit 56"):
        check_machine(settings, Machine(56, has_gpus=True))
    text = memory(LARGE)
    matrices = (40 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672) + 128256 * 8192) / 8
    held, gains = 4 * matrices / 4 / GIB, 4 * 80 * 8192 / 4 / GIB
    weights = held + gains
    gathered = 6 * (matrices + 80 * 8192) / GIB
    row = rows_of(text)["64 (pipeline 2 x tensor 8 x 4)"]
    assert row == pytest.approx([weights, weights, 2 * weights, gathered, 4 * weights + gathered], abs=0.006)
    assert 41 < row[-1] < 42
    gathered = "gathered: all weights of the rank, in bfloat16, and all its gradients, in float32, divided after the"
    assert gathered in text and "the rank of the pipeline with most weights" in text


def test_a_pipeline_that_frees_gathered_weights_holds_two_groups_of_them():
    flags = ["--parallelism.fsdp_reshard_after_forward=always", "--parallelism.pipeline_parallel_schedule=LoopedBFS"]
    text = memory(LARGE, *flags)
    gradients = 4 * (40 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672) + 128256 * 8192) / 8 / GIB
    head_and_block = 2 * (128256 * 8192 + 8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672) / 8 / GIB
    assert rows_of(text)["64 (pipeline 2 x tensor 8 x 4)"][3] == pytest.approx(gradients + head_and_block, rel=2e-2)
    assert "gathered: the two largest groups of weights, in bfloat16, and all its gradients, in float32, div" in text


@pytest.mark.parametrize(
    "kind, degree, name", [("data_parallel_replicate", 4, "4 (4 x 1)"), ("tensor_parallel", 2, "2 (tensor 2 x 1)")]
)
def test_a_single_shard_is_copied_in_the_dtype_of_the_computation(kind, degree, name):
    layout = [f"--parallelism.{kind}_degree={degree}", "--parallelism.data_parallel_shard_degree=1"]
    row = rows_of(memory("--model.flavor=8B", "--model_args.n_layers=1", "--model.converters=", *layout))[name]
    head = 2 * 128256 * 4096 / (degree if kind == "tensor_parallel" else 1) / GIB
    assert row[3] == pytest.approx(2 * head, abs=0.006), "embedding and head"


def test_experts_are_counted_as_a_token_uses_them(capsys):
    assert cli.main(["doctor", "--model", "train_configs/qwen3_moe_debug.toml"]) == 0
    text = capsys.readouterr().out
    counts = {name: int(n.replace(",", "")) for name, n in re.findall(r"^  (\D+?)  +([\d,]+)$", text, re.M)}
    assert counts["used by one token"] == counts["parameters"] - 4 * 12 * 3 * 256 * 256


@pytest.mark.parametrize(
    "tensor, expert, expert_tensor, of_experts",
    [(1, 4, 1, 4), (2, 1, 1, 2), (2, 4, 1, 4), pytest.param(2, 4, 2, 8, marks=only_022)],
)
def test_gathered_experts_are_divided_by_features_only_with_expert_tensor_parallelism(
    tensor, expert, expert_tensor, of_experts
):
    degrees = {"tensor": tensor, "expert": expert, "expert_tensor": expert_tensor}
    flags = [f"--parallelism.{name}_parallel_degree={degree}" for name, degree in degrees.items()]
    group = torch.nn.ParameterList([torch.empty(8, 16, 32, device="meta"), torch.empty(16, 8, device="meta")])
    gathered = doctor_model.gathered_bytes([group], torch.bfloat16, parse_job_config(flags).parallelism)
    assert gathered == 2 * (8 * 16 * 32 // of_experts + 16 * 8 // tensor)


@pytest.mark.parametrize(
    "arguments, facts",
    [
        ([], ["--model: CONFIG is missing"]),
        (["--mxnorm.p", "1"], ["--model: CONFIG is missing"]),
        (["no.toml"], ["'no.toml' does not exist"]),
        ([DEBUG, "--model_args.n_heads=3"], ["model_args.n_heads = 3", "dim = 256"]),
        ([DEBUG, "--mxnorm.filter_fqns=outputs"], ["mxnorm.filter_fqns", "'outputs'"]),
        ([DEBUG, "--parallelism.tensor_parallel_degree=3"], ["does not divide the 16 heads of llama3 debugmodel"]),
        pytest.param(
            [DEBUG, "--parallelism.context_parallel_degree=2", "--training.seq_len=96", "--validation.no-enable"],
            ["training.seq_len = 96", "128", "parallelism.context_parallel_degree = 2"], marks=only_022,
        ),
        ([DEBUG, "--model_args.enable_weight_tying", PIPELINE_2],
         ["parallelism.pipeline_parallel_degree = 2 separates the embedding of llama3 debugmodel from the head"]),
        (["qwen3_moe_debug", "--parallelism.expert_parallel_degree=3", "--model_args.num_experts=48"],
         ["parallelism.expert_parallel_degree = 3", "256"]),
    ],
)  # fmt: skip
def test_what_training_refuses_is_one_line(arguments, facts, capsys):
    assert cli.main(["doctor", "--model", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mxtrain: error: ") and error.count("\n") == 1
    for fact in facts:
        assert fact in error


def test_a_pipeline_holds_its_share_of_the_experts_and_its_layouts_fit_them(capsys):
    """Every rank has a block of experts, and the embedding or the head."""
    degrees, expert = {"pipeline": 2, "expert": 4}, 4
    flags = [f"--parallelism.{name}_parallel_degree={degree}" for name, degree in degrees.items()]
    sizes = ["--model_args.n_layers=2", "--model_args.num_experts=64", "--model_args.moe_inter_dim=1024"]
    assert cli.main(["doctor", "--model", "train_configs/qwen3_moe_debug.toml", *flags, *sizes]) == 0
    rows = rows_of(capsys.readouterr().out)
    experts = 64 * 3 * 1024 * 256
    gathered = 2 * 4 * experts / expert / GIB  # weights and gradients in float32
    assert min(int(name.split()[0]) for name in rows) == 2 * expert
    for row in rows.values():
        assert row[3] == pytest.approx(gathered, abs=0.02)


def test_a_tied_head_may_be_split_by_tensor_parallelism():
    assert cli.main(["doctor", "--model", DEBUG, "--model_args.enable_weight_tying", TENSOR_2]) == 0
