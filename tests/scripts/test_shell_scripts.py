"""What the shell scripts answer before they set anything up."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def train(*arguments, cwd=ROOT):
    return subprocess.run(
        ["/bin/bash", ROOT / "scripts" / "train.sh", *arguments],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("arguments, status", [(["--help"], 0), ([], 2)])
def test_usage(arguments, status):
    result = train(*arguments)
    assert result.returncode == status and result.stderr == ""
    assert "scripts/train.sh CONFIG [--verbose] [any TorchTitan flag]" in result.stdout
    assert "set -euo" not in result.stdout


def test_a_missing_config_is_reported_before_anything_is_set_up(tmp_path):
    result = train("train_configs/none.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "mxtrain: error: config 'train_configs/none.toml' does not exist\n"
