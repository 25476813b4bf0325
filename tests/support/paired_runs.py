"""Folders of runs as training leaves them, for tests of comparisons."""

import json
from pathlib import Path

import tomli_w

from mxtrain.analysis.metrics_file import encode_row


def make_run(
    folder: Path, losses, seed=0, lr=1e-3, validation=None, steps=None, p=2, tokens_per_step=64, settings=None, **facts
) -> Path:
    """Write a run with one logged step per loss. ``validation``: step -> loss."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": step, "loss": loss, "tokens_per_second": 100.0, "memory_gib": 1.5, "time": 1.6e9 + step}
        | ({"tokens_seen": step * tokens_per_step} if tokens_per_step else {})
        for step, loss in enumerate(losses, start=1)
    ]
    rows += [{"step": step, "validation_loss": loss} for step, loss in (validation or {}).items()]
    (folder / "metrics.jsonl").write_text("".join(f"{encode_row(row)}\n" for row in rows))
    config = {
        "training": {"steps": len(losses) if steps is None else steps},
        "metrics": {"log_freq": 1},
        "optimizer": {} if lr is None else {"lr": lr},
        "debug": {} if seed is None else {"seed": seed},
        "mxnorm": {"p": p},
    }
    for section, table in (settings or {}).items():
        config.setdefault(section, {}).update(table)
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    facts = {"model": "llama3", "flavor": "tiny", "estimator": "pre_round", **facts}
    (folder / "run.json").write_text(json.dumps({"converter": "mxnorm", "recipe": "mxfp8", "p": p, **facts}))
    return folder
