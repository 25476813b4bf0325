"""Data loader workers live as long as their reader needs them, and no longer."""

import os
import subprocess
import sys
import time

import pytest
import torch

from mxtrain.launched import stop_signals
from mxtrain.titan.data.loader_workers import ignore_stop_signals


def test_data_loader_workers_survive_a_signal_to_the_whole_group():
    """As systemd sends it. The process that reads from them stops after the step, and needs them until then."""
    loader = torch.utils.data.DataLoader(range(8), num_workers=1, worker_init_fn=ignore_stop_signals)
    batches = iter(loader)
    next(batches)
    for number in stop_signals():
        os.kill(batches._workers[0].pid, number)
    time.sleep(0.2)
    assert len(list(batches)) == 7


LEFT_EARLY = """
from torchdata.stateful_dataloader import StatefulDataLoader
from mxtrain.titan.data.loader_workers import end_workers_at_exit, ignore_stop_signals

loaders = []
for persistent in (False, True):
    options = {"num_workers": 1, "persistent_workers": persistent, "worker_init_fn": ignore_stop_signals}
    loader = StatefulDataLoader(range(1000), **options)
    end_workers_at_exit(loader)
    batches = iter(loader)
    print(int(next(batches)))
    loaders.append((loader, batches))
unused = StatefulDataLoader(range(8))
end_workers_at_exit(unused)
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise SystemExit(3)", 3)])
def test_a_process_ends_that_did_not_read_its_loaders_to_the_end(end, status):
    code = LEFT_EARLY + end
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, "0\n0\n") and "Error" not in done.stderr
