"""The wandb run of a resumed run; tests/titan/reports/test_metrics.py has runs that continue."""

import json

import pytest

from mxtrain.titan.reports.wandb_resume import USERS_CHOICES, EarlierRun, chosen_by_user, earlier_run, sync_command

ROWS = '{"step": 1, "loss": 9.0}\n{"step": 8, "loss": 9.0}\n{"step": 8, "validation_loss": 9.0}\n'


@pytest.mark.parametrize(
    "facts, metrics, expected",
    [
        ({"wandb": {"id": "abc"}}, ROWS, EarlierRun("abc", 8)),
        ({"wandb": {"id": None}}, ROWS, None),
        ({"wandb": {"mode": "offline"}}, ROWS, None),  # of an older version
        ({"wandb": None}, ROWS, None),
        ({}, ROWS, None),
        ({"wandb": {"id": "abc"}}, "", None),
        ({"wandb": {"id": "abc"}}, "nonsense\n" + ROWS, None),
    ],
)
def test_the_earlier_run_is_in_its_files(tmp_path, facts, metrics, expected):
    assert earlier_run(tmp_path) is None
    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / "metrics.jsonl").write_text(metrics)
    assert earlier_run(tmp_path) == expected


@pytest.mark.parametrize("name", USERS_CHOICES)
def test_the_user_decides(monkeypatch, name):
    for other in USERS_CHOICES:
        monkeypatch.delenv(other, raising=False)
    assert not chosen_by_user()
    monkeypatch.setenv(name, "mine")
    assert chosen_by_user()


def test_the_sync_command_has_the_parts_that_are_not_uploaded_in_their_order(tmp_path):
    assert sync_command(tmp_path, "abc") is None
    run = tmp_path / "my run"
    # Two starts within a second get a number.
    starts = (("3", "1", ""), ("2", "2", ""), ("2", "2", "-1"))
    names = [f"tb/{tb}/wandb/offline-run-2026010{day}_000000-abc{number}" for tb, day, number in starts]
    for name, run_id in [*((name, "abc") for name in names), ("tb/2/wandb/offline-run-20260101_000000-abcd", "abcd")]:
        (run / name).mkdir(parents=True)
        (run / name / f"run-{run_id}.wandb").write_text("")
    first, second, third = (run / name for name in names)
    assert sync_command(run, "abc") == f"wandb sync '{first}' '{second}' '{third}'"
    (first / "run-abc.wandb.synced").write_text("")
    assert sync_command(run, "abc") == f"wandb sync '{second}' '{third}'"
