"""What mxtrain adds to a trainer of TorchTitan, on a tiny model without TorchTitan's own parts."""

import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tomli
import torch

from mxtrain.checkpoints.ending import LossWatch, NonFiniteError, Stop, StopSignals
from mxtrain.checkpoints.start import Start
from mxtrain.rng.rounding import position_as_set
from mxtrain.settings.read import read_settings
from mxtrain.titan.releases import engine
from mxtrain.titan.train import _train

Trainer = engine().Trainer
_, TitanTrainer = Trainer.__bases__


def one_process() -> SimpleNamespace:
    return SimpleNamespace(get_optional_mesh=lambda name: None, dp_shard=1, cp=1, pp=1, pp_enabled=False, world_size=1)


class FakeCheckpointer:
    """As mxtrain's: saves even steps, and the one after which training stops."""

    saved, saved_step = (), None

    def __init__(self, run):
        self.run, self.states = run, {}

    def save(self, step, last_step=False):
        if (last_step or step % 2 == 0 or self.run.is_stopping()) and self.run.may_save(step):
            self.saved, self.saved_step = (*self.saved, step), step


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """A trainer of a tiny model, without what TorchTitan builds, and without its ``train_step``."""

    def init(self):
        self.config = self.job_config  # what 0.3 calls it
        self.device = torch.device("cpu")
        self.parallel_dims = one_process()
        self.model_parts = [torch.nn.Linear(2, 2)]
        self.optimizers = SimpleNamespace(optimizers=[torch.optim.AdamW(self.model_parts[0].parameters())])
        self.checkpointer = FakeCheckpointer(self)
        self.validated = []
        self.metrics_processor = SimpleNamespace(
            logger=None,
            should_log=lambda step: False,
            log_validation=lambda loss, step: self.validated.append((step, loss)),
        )
        self.validator = SimpleNamespace(
            validate=lambda _, step: self.metrics_processor.log_validation(loss=float("inf"), step=step)
        )
        self.dataloader = None
        self.gradient_accumulation_steps = 1

    def train_step(self, losses):
        for loss in losses:
            self.forward_backward_step(loss=loss, global_valid_tokens=1.0)

    monkeypatch.setattr(Trainer, "_build", init)
    monkeypatch.setattr(TitanTrainer, "train_step", train_step)
    monkeypatch.setattr(
        TitanTrainer, "forward_backward_step", lambda self, loss, global_valid_tokens: torch.tensor(loss)
    )
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    made = []

    def make(*flags):
        settings = read_settings(["--model.converters=", f"--job.dump_folder={tmp_path}", *flags])
        made.append(Trainer(settings, None, Start(0)))
        return made[-1]

    yield make
    for one in reversed(made):
        one._signals.restore()


def test_layers_with_images_are_kept_and_switched_layers_are_measured_at_once(trainer, monkeypatch, tmp_path):
    merges = "--model.converters=mxnorm", "--mxnorm.mode=fp8_merged"
    numerics = trainer(*merges)._numerics
    assert [step for step in range(1, 401) if numerics.is_due(step)] == [200, 400]
    assert trainer(*merges, "--mxnorm.diagnostics.every=0")._numerics is None
    flags = *merges, "--mxnorm.diagnostics.every=5"
    one, measured = trainer(*flags), []
    one._measure = lambda **_: measured.append(one.step)
    one._switch.begin_step = lambda step: step == 3
    for one.step in range(1, 7):
        one.train_step([1.0, 1.0])
    assert measured == [3, 5]
    one._guard.restore(["layers.0.w2"])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    manifest = one.manifest(6, holds_trainer=True)
    again = trainer(*flags)
    again.start = SimpleNamespace(checkpoint=tmp_path, manifest=manifest, abandoned=())
    again.step = again.job_config.training.steps
    again.after_load()
    assert again._guard.images == ["layers.0.w2"]
    other = trainer("--model.converters=mxnorm", "--mxnorm.mode=emulated")
    assert other._guard is other._numerics is None


def test_deterministic_runs_do_not_fill_new_memory(trainer, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    trainer("--debug.deterministic")
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_a_loss_that_ends_a_run_has_a_row_unless_it_was_logged(trainer, monkeypatch):
    """Where the text ends, TorchTitan counts a step that was not done."""
    rows = []
    monkeypatch.setattr("mxtrain.titan.training_run.log_loss", lambda _, *row: rows.append(row))
    one = trainer()
    one.step, one._last_step, one.ntokens_seen = 4, 3, 96
    for logged in (2, 3, 4):
        one.metrics_processor.should_log = logged.__eq__
        one._log_end(NonFiniteError("step 2: the loss is inf", 2, float("inf")))
        assert rows == [(2, float("inf"), 64)] * (logged == 4)


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("what", ["weights", "optimizer states"])
def test_weights_and_states_that_end_a_run_are_an_event(trainer, monkeypatch, saves, what):
    """Also without a checkpoint: the loss of the last step is from before its update."""
    logged = []
    monkeypatch.setattr("mxtrain.titan.training_run.log_event", lambda _, *event: logged.append(event))
    one = trainer()
    one.checkpointer.finish = lambda: None

    def train(self):
        self.step = 4
        self.train_step([3.0])
        if saves:
            self.checkpointer.save(4)

    monkeypatch.setattr(TitanTrainer, "train", train)
    (bias,) = (parameter for parameter in one.model_parts[0].parameters() if parameter.ndim == 1)
    (bias.data if what == "weights" else state_of(one, bias)["exp_avg_sq"])[1] = float("inf")
    with pytest.raises(NonFiniteError, match=f"^step 4: the {what} after this step hold inf on rank 0$"):
        one.train()
    assert logged == [(4, f"{what} are not finite")]


def state_of(one, parameter) -> dict:
    (optimizer,) = one.optimizers.optimizers
    one.model_parts[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer.state[parameter]


@pytest.mark.parametrize("bad", ["validation", "weights"])
def test_a_validation_loss_that_is_not_finite_stops_the_run(trainer, monkeypatch, caplog, bad):
    """The weights say more, where they are the cause."""
    logged, found = [], "step 4: the validation loss is inf on rank 0"
    monkeypatch.setattr("mxtrain.titan.training_run.log_event", lambda _, *event: logged.append(event))
    monkeypatch.setattr(TitanTrainer, "train", lambda self: self.validator.validate(self.model_parts, self.step))
    flags = ["--training.dataset=python", "--validation.enable"]
    runs = [trainer(*flags, f"--metrics.on_nonfinite_loss={then}") for then in ("stop", "continue")]
    for one in runs:
        one.step, one.checkpointer.finish = 4, lambda: None
        if bad == "weights":
            one.model_parts[0].bias.data[1] = float("nan")
            found = "step 4: the weights after this step hold nan on rank 0"
    with pytest.raises(NonFiniteError, match=f"^{found}$"):
        runs[0].train()
    assert runs[0].validated == [(4, float("inf"))] and len(logged) == (bad == "weights")
    runs[1].train()
    way_on = (
        "no checkpoint is saved" if bad == "weights" else 'training goes on (metrics.on_nonfinite_loss = "continue")'
    )
    assert [m for m in caplog.messages if m.startswith("step")] == [f"{found}; {way_on}"]


@pytest.mark.parametrize("validated, signal, expected", [(3, None, [4]), (4, None, []), (3, 15, [])])
def test_a_run_is_validated_after_its_last_step_unless_a_signal_stops_it(
    trainer, monkeypatch, validated, signal, expected
):
    """Where the text ends, TorchTitan counts a step that was not done."""
    found, one = [], trainer("--training.dataset=python", "--validation.enable")
    monkeypatch.setattr(TitanTrainer, "train", lambda self: None)
    one.step, one._last_step, one._validated, one._watch.stop_signal = 5, 4, validated, signal
    one.validator.validate = lambda _, step: found.append(step)
    one.checkpointer.finish = lambda: None
    one.train()
    assert found == expected


def test_weights_that_are_not_finite_are_not_saved_though_every_loss_was(trainer, caplog):
    stops, goes_on = trainer(), trainer("--metrics.on_nonfinite_loss=continue")
    for one in (stops, goes_on):
        for one.step in (1, 2):
            one.train_step([3.0, 2.0])
            one.checkpointer.save(one.step)
        one.model_parts[0].bias.data[1] = float("-inf")
    found = "step 4: the weights after this step hold inf on rank 0"
    with pytest.raises(NonFiniteError) as error:
        stops.checkpointer.save(4)
    assert str(error.value) == found
    goes_on.checkpointer.save(4)
    goes_on.checkpointer.save(5, last_step=True)
    assert [m for m in caplog.messages if m.startswith("step")] == [
        f"{found}; no checkpoint is saved",
        f"{found.replace('4', '5')}; no checkpoint is saved",
    ]
    assert stops.checkpointer.saved == goes_on.checkpointer.saved == (2,)
    os.kill(os.getpid(), signal.SIGUSR1)
    goes_on.step = 6
    goes_on.train_step([3.0])
    assert not goes_on.should_continue_training() and goes_on.stop == Stop(signal.SIGUSR1, 6, is_saved=False)


def test_a_stop_signal_saves_the_step_in_which_it_came(trainer):
    one = trainer("--training.steps=9")
    for one.step in (1, 3):
        one.train_step([3.0])
        one.checkpointer.save(one.step)  # no interval ends here
        assert one.should_continue_training() == (one.step == 1)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert one.checkpointer.saved == (3,)
    assert one.stop == Stop(signal.SIGUSR1, 3, is_saved=True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_signal_in_the_last_step_changes_nothing(trainer):
    one = trainer("--training.steps=2")
    for one.step in (1, 2):
        one.train_step([3.0])
        os.kill(os.getpid(), signal.SIGTERM)
    assert not one.should_continue_training()
    assert one.stop is None


def test_a_start_that_fails_leaves_the_settings_of_the_one_before(trainer, monkeypatch, tmp_path):
    monkeypatch.setattr(TitanTrainer, "close", lambda self: None)
    for seed, loss, kept in [(4, "fails", 4), (5, "fails", 4), (5, 3.0, 5)]:
        monkeypatch.setattr(TitanTrainer, "train", lambda self, losses=(loss,): self.train_step(losses))
        one = trainer(f"--debug.seed={seed}")
        one.step, one.checkpointer.finish = 7, lambda: None
        with pytest.raises(TypeError) if loss == "fails" else nullcontext():
            _train(lambda one=one: one)
        assert tomli.loads((tmp_path / "config.toml").read_text())["debug"] == {"seed": kept}


def test_one_microbatch_that_is_not_finite_is_enough(trainer):
    one = trainer()
    one.step = 7
    with pytest.raises(NonFiniteError, match="^step 7: the loss is inf on rank 0$"):
        one.train_step([3.0, float("inf"), 2.0])


def test_the_trainer_sets_step_and_microbatch(monkeypatch):
    seen, begun = [], []

    def train_step(self, data_iterator):
        for _ in range(3):
            self.forward_backward_step(input_dict={}, labels=None, global_valid_tokens=1.0)

    def forward_backward_step(self, **kwargs):
        seen.append(position_as_set("cpu").tolist())
        return torch.tensor(1.0)

    monkeypatch.setattr(TitanTrainer, "train_step", train_step)
    monkeypatch.setattr(TitanTrainer, "forward_backward_step", forward_backward_step)
    trainer = object.__new__(Trainer)
    trainer.device, trainer.parallel_dims, trainer._rank_in_stage = torch.device("cpu"), one_process(), 0
    trainer._watch = LossWatch(trainer.device, stops=True)
    trainer._signals, trainer._numerics, trainer._ready, trainer._last_step = StopSignals(), None, None, 6
    trainer._codes, trainer._guard, trainer.gradient_accumulation_steps = None, None, 3
    trainer._switch = SimpleNamespace(begin_step=begun.append)
    for trainer.step in (7, 8):
        trainer.train_step(None)
    trainer._signals.restore()
    assert seen == [[7, 0, 0], [7, 1, 0], [7, 2, 0], [8, 0, 0], [8, 1, 0], [8, 2, 0]]
    assert begun == [7, 8]
