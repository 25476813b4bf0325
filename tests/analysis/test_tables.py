import json
import math
import os

import matplotlib
import pytest

from mxtrain.analysis import load_run, summary, table, tables
from mxtrain.analysis.plots import literal
from mxtrain.diagnostics.merge_guard import MergeGuard
from tests.support import paired_runs


def make_run(folder, losses, validation=None, mode="reference", **facts):
    """A run that was validated after its last step."""
    validated = None if validation is None else {len(losses): validation}
    return paired_runs.make_run(folder, losses, validation=validated, mode=mode, **facts)


def test_a_picture_that_cannot_be_written_does_not_hide_the_numbers(tmp_path):
    (make_run(tmp_path / "a", [9.0, 8.0]) / "loss.png").mkdir()
    lines = summary(tmp_path / "a").splitlines()
    assert lines[1] == "loss        9.0000 -> 8.0000, 2 of 2 steps logged"
    where = tmp_path / "a" / "loss.png"
    assert lines[-1] == f"loss curve  not drawn: the picture {where} cannot be written: Is a directory"


@pytest.fixture
def without_picture(monkeypatch):
    """The summary does not draw, which takes most of its time."""
    monkeypatch.setattr(tables, "plot", lambda runs, path: path)


def test_a_table_has_one_aligned_line_per_run(tmp_path):
    runs = [
        load_run(make_run(tmp_path / "a", [10.0, 9.0, 8.0], validation=8.25)),
        load_run(make_run(tmp_path / "longer-name", [10.0, math.nan], converter="none", precision="float32 compute")),
    ]
    lines = table(runs).splitlines()
    header, first, second = [line.split() for line in lines]
    assert header[:3] == ["run", "variant", "steps"]
    assert [line.index(word) for line, word in zip(lines, ("variant", "mxnorm", "fp32"))] == [13] * 3
    assert len({len(line) for line in lines}) == 1  # numbers align right
    assert first == ["a", "mxnorm", "mxfp8", "p=2", "3", "10.0000", "8.0000", "8.0000", "8.2500", "100", "1.50"]
    assert second == ["longer-name", "fp32", "2", "10.0000", "nan", "nan", "-", "100", "1.50"]


def test_a_summary_draws_the_losses_and_describes_the_run(tmp_path):
    folder = make_run(tmp_path / "a", [10.0, 9.0, 8.0], validation=8.25)
    text = summary(folder)
    assert len({line.index(line.split("  ")[-1].lstrip()) for line in text.splitlines()}) == 1  # values align
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    for part in (
        "a (mxnorm mxfp8 p=2, reference)",
        "10.0000 -> 8.0000, fell over 3 steps (mean of the last 10 %: 8.0000)",
        "8.2500 at step 3",
        "tokens/s    100\n",
        "1.50 GiB",
        str(folder / "loss.png"),
    ):
        assert part in text
    assert "wandb" not in text


def test_a_summary_names_a_mode_once(tmp_path, without_picture):
    text = summary(make_run(tmp_path / "a", [9.0], mode="fp8_merged"))
    assert text.splitlines()[0] == "run         a (mxnorm mxfp8 p=2 fp8_merged)"


def test_a_summary_has_the_largest_share_of_changed_codes_and_counts_the_layers_that_fell_back(
    tmp_path, without_picture
):
    run = make_run(tmp_path / "a", [9.0, 8.0], mode="fp8_merged")
    keys = [f"numerics/layers.{layer}.wo/fprop_input_merged" for layer in range(2)]
    told = []
    guard = MergeGuard(0.05, [], str, lambda step, text: told.append({"step": step, "event": text}))
    for step, shares in enumerate([(0.01, 0.02), (0.2, 0.04), (0.06,)]):
        figures = dict(zip(keys[::-1] if step == 2 else keys, shares))
        guard.check(step, figures)
        with open(run / "metrics.jsonl", "a") as file:
            rows = [{"step": step, **figures}, *told]
            file.write("".join(f"{json.dumps(row)}\n" for row in rows))
        told.clear()
        (line,) = (line for line in summary(run).splitlines() if line.startswith("merged "))
        share, layer = ((0.02, 1), (0.2, 0), (0.2, 0))[step]
        above = f"; layers that exceeded mxnorm.merge_limit: {step}" if step else ""
        changed = f"at most {share} of a cast's codes changed (layers.{layer}.wo/fprop_input_merged)"
        assert line == f"merged      {changed}{above}"


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([9.0, 9.5, 10.0], "rose over 3 steps (mean of the last 10 %: 10.0000)"),
        ([9.0, 9.0, 9.0], "unchanged over 3 steps"),
        # Neighbors at the end differ by 0.2, so that one loss has a noise of 0.14.
        ([5.2] + [4.9, 5.1] * 15, "unchanged over 31 steps (mean of the last 10 %: 5.0333)"),
        ([9.0, math.nan, 8.0], "loss is NOT FINITE at step 2"),
        ([9.0], "1 of 1 steps logged"),
    ],
)
def test_a_summary_says_whether_the_loss_fell_by_more_than_its_noise(tmp_path, without_picture, losses, verdict):
    text = summary(make_run(tmp_path / "a", losses))
    assert verdict in text and "fell over" not in text
    assert "fell over 31 steps" in summary(make_run(tmp_path / "b", [5.4] + [4.9, 5.1] * 15))


@pytest.mark.parametrize("what", ["weights", "optimizer states"])
def test_a_summary_warns_of_weights_and_states_that_are_not_finite(tmp_path, without_picture, what):
    run = make_run(tmp_path / "a", [9.0, 8.0])
    with open(run / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": 2, "event": "{what} are not finite"}}\n')
    assert f"{what} are NOT FINITE after step 2" in summary(run)


def test_a_summary_warns_of_a_validation_that_is_not_finite(tmp_path, without_picture):
    assert "8.0000, validation loss is NOT FINITE at step 3" in summary(
        make_run(tmp_path / "a", [9.0, 8.5, 8.0], validation=math.nan)
    )


def test_a_summary_gives_the_address_of_a_wandb_run_or_the_upload_command(tmp_path, without_picture):
    wandb = {"mode": "offline", "dir": "tb/w", "url": None, "sync": "wandb sync tb/w"}
    assert "offline; upload with: wandb sync tb/w" in summary(make_run(tmp_path / "a", [9.0], wandb=wandb))
    wandb = {"mode": "online", "dir": "tb/w", "url": "https://wandb.example/r", "sync": None}
    assert "https://wandb.example/r" in summary(make_run(tmp_path / "b", [9.0], wandb=wandb))
    assert "tb/w" in summary(make_run(tmp_path / "c", [9.0], wandb={**wandb, "url": None}))


def test_a_summary_counts_the_devices(tmp_path, without_picture):
    assert "100 per device, 800 on 8" in summary(make_run(tmp_path / "a", [9.0], world_size=8))


def test_a_matplotlibrc_that_wants_latex_draws_the_picture(tmp_path, monkeypatch):
    make_run(tmp_path, [4.0, 3.0])
    with matplotlib.rc_context({"text.usetex": True}):
        assert "not drawn" not in summary(tmp_path) and (tmp_path / "loss.png").stat().st_size > 0


def test_a_name_that_is_not_utf_8_is_drawn():
    assert literal(os.fsdecode(b"o_\xff$")).encode("ascii") == rb"o_?\$"
