"""Checkpoints of one process: whole or absent, whatever happens while they are saved."""

import errno
import io
import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful

from mxtrain.checkpoints import storage
from mxtrain.checkpoints.checkpointer import RANDOM_STATE, Checkpointer, SaveError, kept_stager
from mxtrain.checkpoints.folder import Checkpoints, Manifest, check_hashes
from mxtrain.checkpoints.start import find_start
from mxtrain.checkpoints.storage import CheckpointWriter
from mxtrain.errors import ConfigError
from mxtrain.titan.job_config import parse_job_config
from tests.support.hostile_pickles import NAME, Code, put_code_into_index


class State(Stateful):
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def build(tmp_path):
    built, loaded = [], []

    def checkpointer(*flags, model=None, value=0, adapter=None):
        flags = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=2", *flags]
        settings = parse_job_config(flags).checkpoint
        run = SimpleNamespace(
            start=find_start(tmp_path, settings, 1),
            saved_name=lambda name: name,
            manifest=lambda step, holds_trainer: Manifest(step, holds_trainer, {}, settings={"optimizer": {"lr": 0.5}}),
            may_save=lambda step: True,
            before_save=lambda: None,
            is_stopping=lambda: False,
            after_load=lambda: loaded.append(one),
        )
        one = Checkpointer(
            run,
            dataloader=State(value),
            model_parts=[model or torch.nn.Linear(4, 3)],
            optimizers=State(torch.full((5,), float(value))),
            lr_schedulers=State(value),
            states={"train_state": State(value)},
            checkpoint_config=settings,
            sd_adapter=adapter,
            base_folder=str(tmp_path),
        )
        built.append(one)
        return one

    checkpointer.loaded = loaded
    yield checkpointer
    for one in built:
        one.close()


def saved(tmp_path) -> Checkpoints:
    """The checkpoints on the disk, all of them whole, and with the hashes of their manifests if these have any."""
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    assert checkpoints.problems == {}
    for step, manifest in checkpoints.whole.items():
        check_hashes(checkpoints.path(step), manifest, manifest.files)
        assert {p.name for p in checkpoints.path(step).iterdir()} == {*manifest.files, "manifest.json"}
    return checkpoints


@pytest.mark.parametrize("mode, verify", [("disabled", False), ("async", True)])
def test_what_is_saved_is_loaded(build, tmp_path, mode, verify):
    one = build(f"--checkpoint.async_mode={mode}", *["--checkpoint.verify"] * verify, value=7)
    weight = one.model_parts[0].weight.detach().clone()
    for step in (1, 2, 3):  # only step 2 is due
        one.save(step)
    one.finish()
    manifest = saved(tmp_path).whole[2]
    assert list(saved(tmp_path).whole) == [2] and manifest.holds_trainer
    assert manifest.settings == {"optimizer": {"lr": 0.5}}
    assert {file.sha256 is not None for file in manifest.files.values()} == {verify}

    other = build()
    assert other.load() and build.loaded == [other]
    assert torch.equal(other.model_parts[0].weight, weight)
    assert [other.states[k].value for k in ("dataloader", "lr_scheduler", "train_state")] == [7, 7, 7]
    assert other.states["optimizer"].value.tolist() == [7.0] * 5


def test_old_checkpoints_are_removed_at_the_last_step_too(build, tmp_path):
    one = build()
    for step in range(2, 10, 2):
        one.save(step)
    one.save(9, last_step=True)
    one.close()  # waits for the thread that removes them
    assert list(saved(tmp_path).whole) == [8, 9]
    assert not any((tmp_path / "checkpoint" / ".removing").iterdir())


def test_a_step_is_due_at_a_stop_and_saved_if_its_weights_are_worth_it(build, tmp_path):
    one = build("--checkpoint.last_save_model_only")
    one._run.may_save = lambda step: step != 4
    for step in (2, 4, 5):
        one.save(step)
    one._run.is_stopping = lambda: True
    one.save(7)
    assert list(saved(tmp_path).whole) == [2, 7] and one.saved_step == 7 and saved(tmp_path).whole[7].holds_trainer


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "mode, where", [("disabled", (CheckpointWriter, "write_data")), ("async", (storage, "publish"))]
)
def test_training_goes_on_without_a_checkpoint_that_cannot_be_saved(build, tmp_path, monkeypatch, caplog, mode, where):
    """The disk is full at once, or when all but the last name is written."""
    one = build(f"--checkpoint.async_mode={mode}")
    for step, end in (
        (2, "there is no whole checkpoint"),
        (6, f"the newest whole checkpoint is {tmp_path}/checkpoint/step-4"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*where, no_space)
            one.save(step)
            with pytest.raises(SaveError) as error:
                one.finish()
        assert "No space left on device" in str(error.value) and str(error.value).endswith(f"; {end}")
        one.save(step + 2)  # there is space again
        one.finish()
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 2 and warnings[0].endswith("; training goes on")
    assert list(saved(tmp_path).whole) == [4, 8]


def test_a_disk_that_becomes_full_in_the_middle_of_a_file(build, tmp_path, monkeypatch, caplog):
    """torch.save then raises a RuntimeError of its own."""

    class Full(io.FileIO):
        def write(self, content):
            if self.tell() > 2000:
                no_space()
            return super().write(content)

    one = build(model=torch.nn.Linear(100, 100))
    one.save(2)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", lambda self, path, mode: Full(path, mode))
        one.save(4)
    assert "step 4: the checkpoint cannot be saved: " in caplog.text and "training goes on" in caplog.text
    assert list(saved(tmp_path).whole) == [2] and not (tmp_path / "checkpoint" / ".saving").exists()


def test_files_that_another_node_wrote_elsewhere_are_missed(build, tmp_path, monkeypatch, caplog):
    finish = FileSystemWriter.finish

    def move(self, *args):
        finish(self, *args)
        (self.path / "__0_0.distcp").rename(tmp_path / "elsewhere")

    monkeypatch.setattr(storage, "LATE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(FileSystemWriter, "finish", move)
    build().save(2)
    assert saved(tmp_path).found == []
    assert "__0_0.distcp is missing, though a node has written it: is " in caplog.text


def test_training_goes_on_if_old_checkpoints_cannot_be_removed(build, tmp_path, caplog):
    one = build()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / ".removing").touch()
    for step in (2, 4, 6):
        one.save(step)
    assert list(saved(tmp_path).whole) == [2, 4, 6] and "old checkpoints cannot be removed: File exists" in caplog.text


def test_another_process_saves_more_than_once(tmp_path, monkeypatch):
    """As with pinned memory, which a CPU does not have. DCP starts the process in a thread that ends soon."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for step in (2, 4):
        writer = CheckpointWriter(tmp_path / f"step-{step}", Manifest(step, False, {}))
        dcp.async_save(
            {"weight": torch.ones(3)}, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        ).result()
        time.sleep(0.5)
    assert list(Checkpoints(tmp_path).whole) == [2, 4]


def test_two_saves_use_the_same_memory():
    """Without pinned memory and background copies, which need a GPU."""
    stager, weight = kept_stager(StagingOptions(False, False, False, False)), torch.ones(64)
    first = stager.stage({"weight": weight})["weight"]
    weight += 1
    second = stager.stage({"weight": weight})["weight"]
    assert torch.equal(second, weight) and second.data_ptr() == first.data_ptr() != weight.data_ptr()


def test_another_failure_is_no_warning(build, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(CheckpointWriter, "write_data", fail)
    with pytest.raises(RuntimeError, match="step 2: the checkpoint cannot be saved: ZeroDivisionError: oh"):
        build().save(2)


@pytest.mark.parametrize("last", ["write_manifest", "publish"])
def test_a_kill_leaves_nothing_that_has_the_name_of_a_checkpoint(build, tmp_path, monkeypatch, last):
    """Stopped after everything but the manifest and the renaming, which is the last."""
    one = build()
    one.save(2)
    with monkeypatch.context() as patch:
        patch.setattr(storage, last, lambda *_: 1 / 0)
        with pytest.raises(RuntimeError):
            one.save(4)
    assert (tmp_path / "checkpoint" / ".saving" / "step-4").is_dir()
    assert list(saved(tmp_path).whole) == [2]
    one.save(4)  # what was left does not get into the next one
    assert list(saved(tmp_path).whole) == [2, 4]


def test_a_save_removes_what_those_of_other_steps_left(build, tmp_path):
    (tmp_path / "checkpoint" / ".saving" / "step-2").mkdir(parents=True)
    build().save(4)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-4"]


def test_a_checkpoint_of_another_model_is_refused(build):
    build().save(2)
    for model, message in (
        (torch.nn.Linear(4, 5), r"Size mismatch between saved .*\[3\].* and current: .*\[5\].* for bias"),
        (torch.nn.Sequential(torch.nn.Linear(4, 3)), "Missing key in checkpoint state_dict: 0.bias"),
    ):
        with pytest.raises(ConfigError, match=f"step-2 cannot be loaded: .*{message}"):
            build(model=model).load()


def test_initial_weights_come_from_another_run(build, tmp_path):
    first = build(value=7)
    first.save(2)
    weight = first.model_parts[0].weight.detach().clone()
    (tmp_path / "checkpoint").rename(tmp_path / "elsewhere")
    one = build(f"--checkpoint.initial_load_path={tmp_path / 'elsewhere' / 'step-2'}")
    assert one.load() and torch.equal(one.model_parts[0].weight, weight)
    assert one.states["train_state"].value == 0


@pytest.mark.parametrize("excluded, kept", [("dataloader", 7), ("lr_scheduler,train_state", 0)])
def test_a_run_that_begins_at_step_1_has_its_own_random_numbers(build, excluded, kept):
    first = build(value=7)
    first.states[RANDOM_STATE] = State(7)
    first.save(2)
    again = build(f"--checkpoint.exclude_from_loading={excluded}", "--checkpoint.load_only")
    again.states[RANDOM_STATE] = State(0)
    assert again.load() and again.states[RANDOM_STATE].value == kept


def test_a_checkpoint_runs_no_code(build, tmp_path):
    """Its hashes are right, as its author can make them."""
    mark, checkpoint = tmp_path / "mark", tmp_path / "checkpoint" / "step-2"
    first = build()
    first.states["train_state"].value = first.states["extra"] = Code(mark)
    first.save(2)
    with pytest.raises(ConfigError) as error:
        build().load()
    assert str(error.value) == f"{checkpoint} cannot be loaded: it names {NAME}, and could run code"
    checkpoint = checkpoint.parent.rename(tmp_path / "elsewhere") / "step-2"
    of_another = f"--checkpoint.initial_load_path={checkpoint}"
    assert build(of_another).load()  # of the weights alone
    put_code_into_index(checkpoint, mark)
    (checkpoint / "manifest.json").unlink()  # as from TorchTitan
    with pytest.raises(ConfigError) as error:
        build(of_another).load()
    assert str(error.value) == f"{checkpoint / '.metadata'} cannot be loaded: it names {NAME}, and could run code"
    assert not mark.exists()


def test_a_state_is_told_from_weights_whose_names_begin_like_it(build):
    def model():
        return torch.nn.ModuleDict({f"{RANDOM_STATE}s": torch.nn.Linear(2, 2)})

    build(model=model(), value=7).save(2)
    again = build(model=model())
    again.states[RANDOM_STATE] = State(0)
    assert again.load() and again.states["train_state"].value == 7 and again.states[RANDOM_STATE].value == 0


def test_weights_of_hugging_face(build, tmp_path):
    weights = {"model.weight": torch.ones(3, 4), "model.bias": torch.full((3,), 2.0)}
    save_file(weights, tmp_path / "model.safetensors")
    adapter = SimpleNamespace(
        hf_assets_path=str(tmp_path),
        to_hf=lambda state: {f"model.{name}": value for name, value in state.items()},
        from_hf=lambda state: {name.removeprefix("model."): value for name, value in state.items()},
        get_hf_storage_reader=lambda path, is_quantized: HuggingFaceStorageReader(path),
    )
    with pytest.raises(ConfigError, match="checkpoint.initial_load_in_hf = True .* model.hf_assets_path"):
        build("--checkpoint.initial_load_in_hf").load()
    one = build("--checkpoint.initial_load_in_hf", adapter=adapter)
    assert one.load() and one.model_parts[0].bias.tolist() == [2.0, 2.0, 2.0] and one.states["train_state"].value == 0
    one.save(2)
    assert build("--checkpoint.initial_load_in_hf")._run.start.step == 2  # a run that resumes does not begin again


def test_nothing_is_saved_without_checkpoints(build, tmp_path):
    one = build("--checkpoint.no-enable")
    one.save(2, last_step=True)
    one.finish()
    assert not one.load() and list(tmp_path.iterdir()) == [] and build.loaded == []
