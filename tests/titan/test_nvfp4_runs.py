"""Training in NVFP4 from end to end: it learns, resumes with the same random bits, and shards."""

import shutil
import statistics

import pytest
import torch
from training_runs import REPOSITORY, train

from mxtrain.rng.rounding_position import position, set_rounding_step
from mxtrain.titan.train import Trainer, _Trainer


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory):
    """Flags: the recipe, and a text that stays the same while the repository is worked on."""
    folder = tmp_path_factory.mktemp("text")
    shutil.copytree(REPOSITORY / "mxtrain", folder / "mxtrain", ignore=shutil.ignore_patterns("__pycache__"))
    return ["--mxnorm.recipe=nvfp4", f"--training.dataset_path={folder}/mxtrain/**/*.py"]


def test_it_learns(tmp_path, nvfp4):
    rows = train(tmp_path, *nvfp4, "--training.steps=10")
    losses = [row["loss"] for row in rows]
    assert statistics.mean(losses[-3:]) < losses[0] - 0.3
    assert all(row["grad_norm"] > 0 for row in rows)


def test_a_resumed_run_draws_the_random_bits_that_it_would_have_drawn(tmp_path, nvfp4):
    """The same losses and gradient norms to the last bit, with two microbatches a step."""
    both = [*nvfp4, "--training.local_batch_size=2", "--training.global_batch_size=4", "--lr_scheduler.total_steps=2"]
    flags = [*both, "--checkpoint.enable", "--checkpoint.no-last-save-model-only"]
    whole = train(tmp_path / "whole", *both, "--training.steps=2")
    train(tmp_path / "parts", *flags, "--training.steps=1")
    resumed = train(tmp_path / "parts", *flags, "--training.steps=2")
    numbers = [[(row["step"], row["loss"], row["grad_norm"]) for row in rows] for rows in (resumed, whole)]
    assert numbers[0] == numbers[1]


def test_two_processes_match_one_but_for_their_random_bits(tmp_path, nvfp4):
    """FSDP2 over gloo."""
    flags = [*nvfp4, "--training.steps=2"]
    one = train(tmp_path / "one", *flags)
    two = train(tmp_path / "two", *flags, "--training.local_batch_size=2", processes=2)
    # Two processes start from other weights than one does.
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.05)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.5)


def test_the_trainer_tells_step_and_microbatch(monkeypatch):
    told = []

    def train_step(self, data_iterator):
        for _ in range(3):
            self.forward_backward_step(input_dict={}, labels=None)

    def forward_backward_step(self, **kwargs):
        told.append(position(torch.device("cpu")).tolist())

    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr(Trainer, "forward_backward_step", forward_backward_step)
    trainer = object.__new__(_Trainer)
    for trainer.step in (7, 8):
        trainer.train_step(None)
    set_rounding_step(None)
    assert told == [[7, 0, 0], [7, 1, 0], [7, 2, 0], [8, 0, 0], [8, 1, 0], [8, 2, 0]]
