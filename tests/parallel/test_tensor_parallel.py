"""Gradients under tensor and sequence parallelism against one process, and what is refused."""

import pytest
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mxtrain import ConfigError, MXLinear, MXNorm
from mxtrain.analysis import load_run
from mxtrain.formats.hardware import MERGED
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.schedule import LayerState, Timeline
from mxtrain.nn.split import SplitSequences
from mxtrain.parallel.tensor_parallel import check_part, choose_gathers
from mxtrain.titan.releases import RELEASE
from tests.support import oracle

NEAREST = "--mxnorm.stochastic_rounding=False"
FLAGS = {
    **oracle.RECIPES,
    "quantized head": ["--mxnorm.filter_fqns=layers.0"],
    "recipes of layers": ["--mxnorm.recipes", "layers.0", "nvfp4", NEAREST],
    "scales of rows": ["--mxnorm.recipe=nvfp4_row", NEAREST],
    # Parts of whole groups of 128. From step 2 on, layers multiply images.
    "merged": [
        *("--mxnorm.mode=fp8_merged", "--model_args.dim=256", "--model_args.hidden_dim=512"),
        *("--mxnorm.merge_limit=0", "--mxnorm.diagnostics.every=2"),
    ],
    # Not under FSDP, whose ranks have exact tensor scales of their own tokens.
    "four over six": ["--mxnorm.recipe=nvfp4_4over6", "--mxnorm.tensor_scale=row", NEAREST],
}
AC = "--activation_checkpoint.mode="
# The same graphs as in training, without the minutes that Inductor takes on a CPU.
COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
CODES, HIGH_PRECISION = "--mxnorm.gather=quantized", "--mxnorm.gather=high_precision"
NO_LOSS_PARALLEL = "--parallelism.disable_loss_parallel"
BESIDE = "one process beside tensor parallelism"
SWEEP = "sweep of tensor parallelism on {}"
TWO = {
    "mxfp8, accumulated, full": [*oracle.layout(tensor=2, accumulate=2), f"{AC}full", CODES],
}
QWEN3 = ["--model.name=qwen3", "--model.converters=mxnorm,fused_norm,decompose_k_router"]
TWO_SWEEP = {
    "mxfp8, selective": [*oracle.layout(tensor=2), f"{AC}selective", CODES],
    "mxfp8, selective, high precision": [*oracle.layout(tensor=2), f"{AC}selective", HIGH_PRECISION],
    "dequantized, accumulated, full": [*oracle.layout(tensor=2, accumulate=2), f"{AC}full", CODES],
    "e2m1 and e5m2, full": [*oracle.layout(tensor=2), f"{AC}full", CODES],
    "quantized head": oracle.layout(tensor=2),
    "mxfp8_2d, compiled": [*oracle.layout(tensor=2), *COMPILED, CODES],
    "recipes of layers, compiled": [*oracle.layout(tensor=2), *COMPILED],
    "four over six, selective": [*oracle.layout(tensor=2), f"{AC}selective", CODES],
    "merged": oracle.layout(tensor=2),
    "merged, fsdp": oracle.layout(shard=2),
}
FOUR_SWEEP = {
    "unquantized, tp 4": oracle.layout(tensor=4),
    "mxfp8, tp 2 x fsdp 2, selective": [*oracle.layout(tensor=2, shard=2), f"{AC}selective"],
    "mxfp8, cp 2 x tp 2": oracle.layout(context=2, tensor=2),
    "scales of rows, tp 2 x fsdp 2": oracle.layout(tensor=2, shard=2),
}


def recipe_of(name: str) -> str:
    return name.partition(", ")[0]


def with_recipes(base, runs: dict[str, list[str]]) -> dict[str, list[str]]:
    groups = {recipe: oracle.ALONE if recipe in oracle.RECIPES else BESIDE for recipe in FLAGS}
    followed = {recipe: oracle.follow(base, recipe, groups[recipe]) for recipe in FLAGS.keys() - oracle.HIGH_PRECISION}
    recipes = {name: recipe_of(name) for name in runs}
    return {name: [*flags, *FLAGS[recipes[name]], *followed.get(recipes[name], [])] for name, flags in runs.items()}


def beside(base) -> dict[str, oracle.Training]:
    """What one process computes, by the names of ``FLAGS``. The runs of ``sweep`` follow it."""
    others = {recipe: [*oracle.layout(), *flags] for recipe, flags in FLAGS.items() if recipe not in oracle.RECIPES}
    return oracle.one_process(base) | oracle.train(base, BESIDE, 1, others)


def sweep(base, processes: int) -> dict[str, oracle.Training]:
    runs = with_recipes(base, {2: TWO_SWEEP, 4: FOUR_SWEEP}[processes])
    return oracle.train(base, SWEEP.format(processes), processes, runs)


def two(base) -> dict[str, oracle.Training]:
    """Llama 3, and Qwen3 with experts. Both follow a run of one process."""
    oracle.outcomes_of_one(base)
    without = [NO_LOSS_PARALLEL] if RELEASE == "v02" else []
    qwen3 = [*oracle.layout(tensor=2), *without, *QWEN3, *oracle.follow(base, "qwen3")]
    return oracle.train(base, "tensor parallelism on 2", 2, {**with_recipes(base, TWO), "qwen3": qwen3})


@pytest.mark.parametrize("name", TWO)
def test_gradients_match_one_process(base, name):
    one, found = oracle.one_process(base), two(base)
    oracle.require_match(one[recipe_of(name)], found[name], recipe_of(name))


def test_gradients_of_qwen3_with_experts_match_one_process(base):
    """Also the gradients of the gates and of the norms of heads."""
    one, found = oracle.read(oracle.outcomes_of_one(base)["qwen3"], 1), two(base)["qwen3"]
    assert {"layers.0.moe.router.gate.weight", "layers.1.attention.q_norm.weight"} < found.gradients[0].keys()
    oracle.require_match(one, found, "mxfp8")


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*TWO_SWEEP, *FOUR_SWEEP])
def test_gradients_of_every_layout_match_one_process(base, name):
    one, processes = beside(base)[recipe_of(name)], 2 if name in TWO_SWEEP else 4
    oracle.require_match(one, sweep(base, processes)[name], recipe_of(name))


@pytest.mark.sweep
def test_what_norms_send_changes_no_bit_of_a_training(base):
    beside(base)
    found = sweep(base, 2)
    oracle.compare(found["mxfp8, selective"], found["mxfp8, selective, high precision"], 0.0)


@pytest.mark.sweep
def test_the_guard_of_mode_fp8_merged_sees_all_layers_on_every_layout(base):
    beside(base)
    sweep(base, 2)
    runs = [base / BESIDE / "merged", *(base / SWEEP.format(2) / name for name in ("merged", "merged, fsdp"))]
    assert [load_run(run).image_layers for run in runs] == [14] * 3


def test_norms_know_whether_their_layer_is_checkpointed():
    model = nn.ModuleDict({"checkpointed": checkpoint_wrapper(MXNorm(32)), "plain": MXNorm(32), "whole": MXNorm(32)})
    norms = [module for module in model.modules() if isinstance(module, MXNorm)]
    for norm in norms[:2]:
        norm.split = SplitSequences("group", 2, 0)
    choose_gathers(model, "quantized")
    assert [norm.split and (norm.split.gather, norm.split.forwards) for norm in norms] == [
        ("quantized", 2),
        ("quantized", 1),
        None,
    ]


def linear(recipe: str) -> MXLinear:
    return MXLinear(128, 192, bias=False, recipe=recipe, device="meta")


def test_a_bias_that_every_process_would_add_is_refused():
    biased = MXLinear(64, 64, device="meta")
    check_part("wq", biased, True, 2)
    message = (
        "tensor_parallel_degree = 2 splits wo by input features, and every process would add its bias; set it to 1,"
    )
    with pytest.raises(ConfigError, match=message):
        check_part("wo", biased, False, 2)


def test_parts_in_mode_fp8_merged_are_whole_groups():
    wide = MXLinear(256, 256, mode=MERGED, device="meta")
    check_part("wq", wide, True, 2)
    with pytest.raises(ConfigError, match="degree = 4 splits in_features = 256 of wo into parts that .* groups of 128"):
        check_part("wo", MXLinear(256, 256, bias=False, mode=MERGED, device="meta"), False, 4)


@pytest.mark.parametrize(
    "by_output, recipe, processes, allowed", [(True, "mxfp8", 4, 6), (False, "mxfp8", 8, 4), (True, "nvfp4", 8, 12)]
)
def test_parts_that_are_no_whole_blocks_are_refused(by_output, recipe, processes, allowed):
    match = f"tensor_parallel_degree = {processes} splits .* of wq .* allowed is a divisor of {allowed}$"
    with pytest.raises(ConfigError, match=match):
        check_part("wq", linear(recipe), by_output, processes)
    check_part("wq", linear(recipe), by_output, processes // 2)
    check_part("wq", linear("unquantized"), by_output, processes)
    later = linear("unquantized")
    later.timeline = Timeline({1: later.layer_state, 9: LayerState(get_recipe(recipe))})
    with pytest.raises(ConfigError, match=match):
        check_part("wq", later, by_output, processes)
