"""``optimizer.early_step_in_backward``, which TorchTitan 0.3 does not have."""

from tests.titan.test_resume import require_exact


def test_a_run_with_an_optimizer_per_parameter_resumes_with_all_their_states(one):
    require_exact(one["early steps, resumed"], one["early steps"], 2)


def test_weights_that_change_after_every_microbatch_are_cast_every_time(one):
    """PyTorch does not count the writes of a fused optimizer, so nothing else would tell that they changed."""
    found, expected = one["early steps"].losses, one["early steps, resumed"].losses  # the second caches none
    assert found == expected and len(found) == 2
