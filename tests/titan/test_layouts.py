"""Two processes against one, and checkpoints across converters: the same weights, the same text, the same numbers."""

import pytest
from training_runs import launch, train

BF16 = "--model.converters="
FUSED = "--model.converters=fused_rmsnorm"


@pytest.fixture(scope="module")
def seed_checkpoint(tmp_path_factory):
    """Weights of step 0, saved under mxnorm by one process."""
    folder = tmp_path_factory.mktemp("seed")
    (process,) = launch(folder, "--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
    assert process.returncode == 0, process.stdout[-3000:]
    return folder / "checkpoint" / "step-0"


EXPERTS = ["--model.name=deepseek_v3", "--model.converters=decompose_k_router"]


@pytest.fixture(scope="module")
def seed_checkpoint_of_experts(tmp_path_factory):
    """The same of a mixture of experts, with PyTorch's own gates."""
    folder = tmp_path_factory.mktemp("experts")
    flags = ["--model.name=deepseek_v3", BF16, "--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
    (process,) = launch(folder, *flags)
    assert process.returncode == 0, process.stdout[-3000:]
    return folder / "checkpoint" / "step-0"


def from_checkpoint(path, steps=2):
    return ["--checkpoint.enable", f"--checkpoint.initial_load_path={path}", "--checkpoint.interval=1000",
            f"--training.steps={steps}"]  # fmt: skip


def test_two_processes_match_one(tmp_path, seed_checkpoint):
    flags = from_checkpoint(seed_checkpoint)
    one = train(tmp_path / "one", *flags)
    two = train(tmp_path / "two", *flags, "--training.local_batch_size=2", processes=2)
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], abs=1e-3)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=0.01)
    # The second step sees the first one's update.
    assert two[1]["loss"] == pytest.approx(one[1]["loss"], abs=5e-3)


def test_tensor_parallelism_with_fused_norms_matches_one_process(tmp_path, seed_checkpoint):
    """Norms get shards of the sequence, and each rank a part of the gradient of their weights."""
    flags = [*from_checkpoint(seed_checkpoint), FUSED]
    one = train(tmp_path / "one", *flags)
    two = train(tmp_path / "two", *flags, "--parallelism.tensor_parallel_degree=2", processes=2)
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)


def test_experts_on_two_processes_match_one(tmp_path, seed_checkpoint_of_experts):
    """Under FSDP alone, and with expert parallelism."""
    flags = [*from_checkpoint(seed_checkpoint_of_experts), *EXPERTS]
    one = train(tmp_path / "one", *flags)
    for degree in (1, 2):
        apart = [f"--parallelism.expert_parallel_degree={degree}", "--training.local_batch_size=2"]
        two = train(tmp_path / f"two, {degree}", *flags, *apart, processes=2)
        for a, b in zip(one, two, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], abs=1e-3)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)


def test_full_precision_gates_compute_as_pytorchs_in_fp32(tmp_path, seed_checkpoint_of_experts):
    flags = [*from_checkpoint(seed_checkpoint_of_experts), *EXPERTS, "--activation_checkpoint.mode=selective"]
    ours, theirs = train(tmp_path / "ours", *flags), train(tmp_path / "theirs", *flags, BF16)
    for a, b in zip(ours, theirs, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)


def test_hsdp_matches_one_process(tmp_path, seed_checkpoint):
    """Two replicas of two shards each: four gloo processes."""
    flags = from_checkpoint(seed_checkpoint, steps=1)
    (one,) = train(tmp_path / "one", *flags)
    degrees = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"]
    (four,) = train(tmp_path / "four", *flags, *degrees, "--training.local_batch_size=1", processes=4)
    assert four["loss"] == pytest.approx(one["loss"], abs=1e-3)
    assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.01)


def test_checkpoints_load_across_converters(tmp_path):
    """A checkpoint carries the weights whichever converter wrote it.

    Every run starts with the same text, so a first loss tells what the loaded weights had learnt.
    """
    written = train(tmp_path / "mxnorm", "--training.steps=10", "--checkpoint.enable", "--checkpoint.interval=1000")
    more = from_checkpoint(tmp_path / "mxnorm" / "checkpoint" / "step-10")
    mxnorm, bf16 = train(tmp_path / "mxnorm-mxnorm", *more), train(tmp_path / "mxnorm-bf16", *more, BF16)
    assert mxnorm[0]["loss"] < written[0]["loss"] - 0.2
    assert bf16[0]["loss"] == pytest.approx(mxnorm[0]["loss"], abs=0.05)
    assert bf16[0]["loss"] != mxnorm[0]["loss"]

    more = from_checkpoint(tmp_path / "mxnorm-bf16" / "checkpoint" / "step-2", steps=1)
    back = train(tmp_path / "bf16-mxnorm", *more)
    assert back[0]["loss"] < bf16[0]["loss"] - 0.01, "two more steps on the same text"
