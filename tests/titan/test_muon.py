"""``optimizer.name = "Muon"``: the same training on every layout.

Runs follow one process, whose weights differ from theirs by 0.1 % at most after a step of the optimizer.
"""

import pytest

from tests.support import oracle
from tests.support.oracle import RECIPES, layout

ALONE = "muon alone"
ONE = {"muon": RECIPES["muon"], "muon of experts": oracle.MUON_OF_EXPERTS}
FOUR = {
    "hsdp 2 x 2, muon": layout(replicate=2, shard=2),
    "tp 2 x fsdp 2, muon": layout(tensor=2, shard=2),
    "pp 2 x fsdp 2, muon": layout(pipeline=2, shard=2),
    "fsdp 4, ep 2, muon of experts": layout(shard=4, expert=2),
    "tp 2 x fsdp 2, ep 2, muon of experts": layout(tensor=2, shard=2, expert=2),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_as_one(base, name):
    recipe = name.rpartition(", ")[2]
    one = oracle.train(base, ALONE, 1, {name: [*layout(), *flags] for name, flags in ONE.items()})
    runs = {name: [*flags, *ONE[name.rpartition(", ")[2]]] for name, flags in FOUR.items()}
    found = oracle.train(base, "muon on four", 4, oracle.following(base, runs, ALONE))
    oracle.require_match(one[recipe], found[name], "muon")
