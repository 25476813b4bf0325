"""The same training on N processes and on one: gradients before clipping, losses and gradient norms, step by step.

How to use it::

    from tests.support import oracle

    LAYOUTS = {"tp 2": oracle.layout(tensor=2), "tp 2, full": [*oracle.layout(tensor=2), "--..."]}

    def test_tensor_parallelism_matches_one_process(base):
        one = oracle.one_process(base)["unquantized"]
        found = oracle.train(base, "tensor parallelism", 2, LAYOUTS)  # one group of processes for all runs
        oracle.require_match(one, found["tp 2"], "unquantized")

Flags of a recipe that quantizes also need ``oracle.follow(base, recipe)``.

``train`` runs mxtrain's own trainer with real flags: the flavor "tiny" of llama3 (or ``--model.name=qwen3``), 3 steps,
a global batch of 4 sequences of 128 tokens, and ``RECIPES`` for the recipe. Runs are done once in a session, by the
pytest worker that needs them first, so a group's name must be unique.

Gradients are compared, not weights after a step: AdamW divides by the gradient's size and so hides a wrong scale. They
are full tensors by FQN: shards are gathered, and stages of a pipeline are united. All ranks that hold a parameter must
have the same full gradient, which ``train`` checks bit for bit.

The same seed gives the same initial weights on every layout (``mxtrain.parallel.initial_weights``). A step reads
the same 4 sequences on every layout, in another order: the ranks of a data-parallel group take turns, each with as many
sequences as it computes at a time.

Runs that quantize start each step from the weights that one process had there (``follow``). Left alone, they go apart
whatever the layout: sums in another order change the last bits of weights, now and then one of them is rounded to
another code, and that changes later steps. ``scripts/bench/layouts.py --layouts perturbed`` shows this in one process.
Runs in high precision do not follow.

Everything is float32. TorchTitan 0.2.2 computes in ``training.mixed_precision_param`` by other means on other layouts:
under autocast in one process, under a MixedPrecisionPolicy with FSDP or context parallelism, and not at all (that is,
in float32) with tensor or pipeline parallelism alone. Only in float32 do they all compute the same.

TorchTitan 0.3 multiplies its own experts in bf16 even then, and so does 0.2.2 on a GPU. Every process and microbatch
rounds its part of their gradients, which then differ from one process's by 0.24 % of their norm. mxtrain's experts
multiply in float32.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.recording import FOLLOWS, record_all, record_perturbed
from tests.support.training_runs import Outcome, Resumed, done_once, validate

BATCH, SEQUENCE, STEPS = 4, 128, 3
COMMON = [
    f"--training.global_batch_size={BATCH}",
    f"--training.seq_len={SEQUENCE}",
    f"--training.steps={STEPS}",
    "--training.mixed_precision_param=float32",
    "--optimizer.lr=1e-3",
    # As large as gradients are. With 1e-8 AdamW would follow the sign of gradients that are nearly zero, and so turn
    # differences in the last bit of a sum into whole steps.
    "--optimizer.eps=1e-3",
]
# Random bits differ between ranks: with them, NVFP4's gradients differ by a fifth of their norm.
NEAREST = "--mxnorm.no-stochastic_rounding"
RECIPES = {
    "bf16": ["--model.converters="],
    "unquantized": ["--mxnorm.recipe=unquantized"],
    "mxfp8": [],
    "mxfp8_2d": ["--mxnorm.recipe=mxfp8_2d"],
    "mx_linear": ["--model.converters=mx_linear"],
    "fused_norm": ["--model.converters=fused_norm"],
    "nvfp4": ["--mxnorm.recipe=nvfp4", NEAREST],
    "dequantized": ["--mxnorm.recipe=nvfp4", "--mxnorm.backward=dequantized"],
    "e2m1 and e5m2": [
        "--mxnorm.recipe=mxfp4",
        *("--mxnorm.recipes", "layers.0", "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2"),
    ],
    "mixed": ["--mxnorm.recipe=fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4", NEAREST],
    "muon": ["--model.converters=", "--optimizer.name=Muon"],
}
"""Name -> flags. "bf16" and "muon" are the model without a converter, here in float32."""
MUON_OF_EXPERTS = ["--model.name=qwen3", *RECIPES["unquantized"], "--optimizer.name=Muon"]
"""Flags of Muon for experts that multiply in float32 under both releases of TorchTitan"""
ALONE = "oracle of one process"
HIGH_PRECISION = {"bf16", "unquantized", "fused_norm", "experts"}
"""Names of recipes that do not quantize: of ``RECIPES``, and DeepSeek's experts among the tests of pipelines"""


@dataclass(frozen=True)
class Training:
    losses: list[float]
    """Mean over the global batch, by step"""
    grad_norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    """By step: FQN -> full gradient before clipping"""


def layout(
    replicate: int = 1,
    shard: int = 1,
    context: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    accumulate: int = 1,
) -> list[str]:
    """Return the flags of a layout, whose processes are the product of all degrees but those of experts.

    Args:
        accumulate: number of microbatches of gradient accumulation.
    """
    degrees = {
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "expert": expert,
    }
    return [
        f"--parallelism.data_parallel_replicate_degree={replicate}",
        f"--parallelism.data_parallel_shard_degree={shard}",
        *(f"--parallelism.{kind}_parallel_degree={degree}" for kind, degree in degrees.items()),
        f"--training.local_batch_size={BATCH // (replicate * shard * accumulate)}",
    ]


def validated(base: Path) -> list[str]:
    """Return flags to validate after the first step, and after the last one."""
    return [*validate(base), f"--validation.seq_len={SEQUENCE}", f"--validation.freq={STEPS}"]


def outcomes_of_one(base: Path) -> dict[str, Outcome]:
    """Return what one process computes, by the name of a recipe; "validated" and "qwen3" are in MXFP8."""
    runs = RECIPES | {"validated": validated(base), "qwen3": ["--model.name=qwen3", *validated(base)]}
    return outcomes_of(base, ALONE, 1, {name: [*layout(), *flags] for name, flags in runs.items()})


def one_process(base: Path) -> dict[str, Training]:
    """Return the losses and gradients of ``outcomes_of_one`` for each of ``RECIPES``."""
    outcomes = outcomes_of_one(base)
    return {name: read(outcomes[name], 1) for name in RECIPES}


def follow(base: Path, recipe: str, group: str = ALONE) -> list[str]:
    """Return a flag that makes every step start from the weights that a run of one process had there.

    That run must be done before.

    Args:
        base: the fixture ``base``.
        recipe: the run's name in ``group``.
        group: name of a group of runs of one process.
    """
    return [f"--job.description={FOLLOWS}{base / group / recipe}"]


def following(base: Path, runs: dict[str, list[str]], group: str = ALONE) -> dict[str, list[str]]:
    """Make those of ``runs`` that quantize follow one process. The name of a run ends with ", " and its recipe's."""
    recipes = {name: name.rpartition(", ")[2] for name in runs}
    return {
        name: flags if recipes[name] in HIGH_PRECISION else [*flags, *follow(base, recipes[name], group)]
        for name, flags in runs.items()
    }


def train(base: Path, group: str, processes: int, runs: dict[str, list[str]]) -> dict[str, Training]:
    """Do ``runs`` (name -> flags) one after another on ``processes`` gloo processes, once in a session.

    Args:
        base: the fixture ``base``.
        group: a name for these runs, unique in a session.

    Raises:
        AssertionError: a run fails, or ranks have different gradients of a parameter.
    """
    outcomes = outcomes_of(base, group, processes, runs)
    return {name: read(outcome, processes) for name, outcome in outcomes.items()}


def outcomes_of(
    base: Path, group: str, processes: int, runs: dict[str, list[str] | Resumed], perturbed: bool = False
) -> dict[str, Outcome]:
    """Do ``runs`` as ``train`` does, and return exit statuses, output and folders.

    Args:
        perturbed: change all initial weights by 1e-7 of themselves, about as much as another order of sums does.
    """
    prepare = record_perturbed if perturbed else record_all
    runs = {name: run if isinstance(run, Resumed) else [*COMMON, *run] for name, run in runs.items()}
    return done_once(base, group, processes, runs, prepare)


def read(outcome: Outcome, processes: int) -> Training:
    rows = outcome.rows
    return Training(
        losses=[row["loss"] for row in rows],
        grad_norms=[row["grad_norm"] for row in rows],
        gradients=[_unite(outcome.folder, row["step"], processes) for row in rows],
    )


def _unite(folder: Path, step: int, processes: int) -> dict[str, torch.Tensor]:
    records = [torch.load(folder / f"gradients-{step}-{rank}.pt") for rank in range(processes)]
    gradients, digests = {}, {}
    for rank, record in enumerate(records):
        for name, digest in record["digests"].items():
            expected = digests.setdefault(name, digest)
            assert digest == expected, f"step {step}: rank {rank} has another gradient of {name} than lower ranks"
        gradients |= record["gradients"]
    return gradients


def differences(one: Training, other: Training) -> list[tuple[float, str]]:
    """Return the largest relative difference of a parameter's gradient, as a norm, and what differs, for every step.

    Raises:
        AssertionError: the parameters differ in number, name or shape, or the number of steps.
    """
    worst = []
    for step, (ours, theirs) in enumerate(zip(other.gradients, one.gradients, strict=True), start=1):
        assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
        largest, where = 0.0, "no parameter"
        for name, expected in theirs.items():
            assert ours[name].shape == expected.shape, (name, ours[name].shape, expected.shape)
            difference = _relative(ours[name], expected)
            if not difference <= largest:  # NaN is worse than every number
                ratio = (ours[name].norm() / expected.norm()).item()
                largest, where = difference, f"step {step}, {name}, whose norm is {ratio:.6g} of one process's"
        worst.append((largest, where))
    return worst


def compare(one: Training, other: Training, tolerance: float) -> None:
    """Raise AssertionError if a gradient, a loss or a gradient norm differs by more than ``tolerance`` in any step.

    The message names the step and the worst parameter.
    """
    for difference, where in differences(one, other):
        assert difference <= tolerance, f"gradients differ by {difference:.3g} of their norm, > {tolerance:g}: {where}"
    for what, values in _scalars(one, other).items():
        for step, (expected, found) in enumerate(values, start=1):
            difference = abs(found - expected) / abs(expected)
            assert difference <= tolerance, f"step {step}: {what} {found:.8g}, of one process {expected:.8g}"


def require_match(one: Training, other: Training, recipe: str) -> None:
    """Raise AssertionError unless a training of a recipe matches one process's, which it followed if it quantizes.

    In high precision all steps agree to 1e-4. Runs with Muon must follow for that: its iterations in bf16 make 3e-4 of
    a difference of 1e-7 in two steps.

    When it quantizes, a sum in another order now and then rounds an operand to another code, which changes more codes
    in the layers after it. In 175 steps of one process whose weights were changed by 1e-7, the gradients of 56 differed
    by 0.1 % to 1 %, with MX linears those of two in three. A fault shows in all steps. So one step must agree to 0.3 %,
    two to 1 %, all to 5 %.
    """
    if recipe in {*HIGH_PRECISION, "muon"}:
        return compare(one, other, 1e-4)
    compare(one, other, 5e-2)
    found = sorted(difference for difference, _ in differences(one, other))
    assert found[0] <= 3e-3 and found[len(found) // 2] <= 1e-2, (
        f"differences of gradients in {len(found)} steps: {found}"
    )


def _scalars(one: Training, other: Training) -> dict[str, list[tuple[float, float]]]:
    return {
        "loss": list(zip(one.losses, other.losses)),
        "gradient norm": list(zip(one.grad_norms, other.grad_norms)),
    }


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
