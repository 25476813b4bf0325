"""Several processes against one, and checkpoints across converters: same weights, same text, same numbers."""

import pytest
import torch

from mxtrain.hugging_face.checkpoint import SavedWeights


def require_equal(ours, theirs, losses: list[float], grad_norm: float):
    """Compare losses with one tolerance per step, and the first gradient norm."""
    assert len(ours.rows) == len(losses)
    for row, expected, tolerance in zip(ours.rows, theirs.rows, losses):
        assert row["loss"] == pytest.approx(expected["loss"], abs=tolerance)
    assert ours.rows[0]["grad_norm"] == pytest.approx(theirs.rows[0]["grad_norm"], rel=grad_norm)


def test_fsdp_and_hsdp_match_one_process(one, several):
    # The second step sees the first one's update.
    require_equal(several["fsdp"], one["from seed"], [1e-3, 5e-3], 0.01)
    require_equal(several["hsdp"], one["from seed"], [1e-3], 0.01)


def test_a_tied_head_on_two_processes_matches_one(one, several):
    """The weight gets the gradients of the embedding and of the head, and stays one weight."""
    require_equal(several["tied, fsdp"], one["tied"], [1e-3, 5e-3], 0.01)
    for run in (several["tied, fsdp"], one["tied"]):
        weights = SavedWeights(run.folder / "checkpoint" / "step-2")
        assert torch.equal(weights["output.weight"], weights["tok_embeddings.weight"])
    assert weights["output.weight"].std() < 0.2, "drawn as a head"


def test_tensor_parallelism_with_fused_norms_matches_one_process(one, several):
    """Norms get shards of the sequence, and each rank a part of the gradient of their weights."""
    require_equal(several["tp"], one["from seed, fused"], [1e-4, 1e-4], 1e-3)


@pytest.mark.parametrize("layout", ["fsdp", "ep"])
def test_experts_on_two_processes_match_one(one, several, layout):
    require_equal(several[f"experts, {layout}"], one["from seed of experts"], [1e-3, 1e-3], 1e-3)


def test_full_precision_gates_compute_like_pytorchs_in_fp32(one):
    theirs = one["from seed of experts, PyTorch's gates"]
    require_equal(one["from seed of experts"], theirs, [1e-4, 1e-4], 1e-3)


def test_nvfp4_on_two_processes_matches_one_but_for_its_random_bits(one, several):
    require_equal(several["nvfp4, fsdp"], one["from seed"], [0.01, 0.05], 0.1)


def test_a_run_goes_on_with_other_numbers_of_processes(one, several):
    """Two steps each on two processes, on one and on four, with the global batch of an uninterrupted run on one.

    The first step shows that two processes start with the weights of one.
    """
    for name in ("resharded", "resharded on one", "resharded on four"):
        assert set(several[name].statuses) == {0}, several[name].output[0][-4000:]
    rows, expected = several["resharded"].rows, one["bf16"].rows[:6]
    for key in ("step", "tokens_seen", "lr"):
        assert [row[key] for row in rows] == [row[key] for row in expected], key
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=1e-5), key
    log = (several["resharded"].folder / "train.log").read_text()
    for before, now in ((2, 1), (1, 4)):
        line = f"generators of {before} process(es), and this run has {now}: the generators start from the seed"
        assert log.count(line) == 1


def test_checkpoints_load_across_converters(one):
    """Every run starts with the same text, so a first loss shows what the loaded weights had learned."""
    mxnorm, bf16 = one["mxnorm, then mxnorm"].losses, one["mxnorm, then bf16"].losses
    assert mxnorm[0] < one["mxnorm"].losses[0] - 0.7
    assert bf16[0] == pytest.approx(mxnorm[0], abs=0.05) and bf16[0] != mxnorm[0]
    back = one["bf16, then mxnorm"].losses
    assert back[0] < one["mxnorm"].losses[0] - 0.7 and back[0] != bf16[0]
