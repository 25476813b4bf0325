"""The same TOML file under TorchTitan 0.2.2 and 0.3: the same losses, and checkpoints that cross."""

import pytest

from tests.support.both_releases import PYTHONS, REPOSITORY, in_both, steps_of

CONFIGS = sorted(path.stem for path in (REPOSITORY / "train_configs").glob("*.toml"))
DEBUG = ["llama3_debug", "qwen3_moe_debug", "deepseek_v3_debug"]
CROSSED = {**{config: (config, []) for config in DEBUG}, "muon": ("qwen3_moe_debug", ["--optimizer.name=Muon"])}
LAYOUTS = {
    "fsdp": [],
    "tp": ["--parallelism.tensor_parallel_degree=2"],
    "pp": ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"],
}
SAVE = ["--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.no-last_save_model_only"]
GO_ON = [*SAVE, "--training.steps=4"]

pytestmark = pytest.mark.skipif(not PYTHONS["0.2.2"], reason="MXTRAIN_TITAN_02 names no Python with TorchTitan 0.2.2")


@pytest.fixture(scope="session")
def first(base):
    """Every config with one process, and the debug configs with two, and in parts."""
    one = {config: (config, []) for config in CONFIGS}
    saved = {f"{name} saved": (config, [*SAVE, *flags]) for name, (config, flags) in CROSSED.items()}
    whole = {f"{name} whole": (config, [*GO_ON, *flags]) for name, (config, flags) in CROSSED.items()}
    two = {f"{config} {layout}": (config, flags) for config in DEBUG for layout, flags in LAYOUTS.items()}
    return in_both(base, "first", dict.fromkeys(PYTHONS, {1: {**one, **saved, **whole}, 2: two}))


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_trains_as_under_022(config, first):
    require_same_steps(*(folder / "1" / config for folder in first.values()))


@pytest.mark.parametrize("config", DEBUG)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_train_as_under_022(config, layout, first):
    require_same_steps(*(folder / "2" / f"{config} {layout}" for folder in first.values()))


@pytest.fixture(scope="session")
def second(base, first):
    """Each release goes on with the runs of the other one, in their folders."""
    plans = {}
    for release, other in (("0.2.2", "0.3"), ("0.3", "0.2.2")):
        folders = {name: f"--job.dump_folder={first[other] / '1' / f'{name} saved'}" for name in CROSSED}
        runs = {name: (config, [*GO_ON, *flags, folders[name]]) for name, (config, flags) in CROSSED.items()}
        plans[release] = {1: runs}
    in_both(base, "second", plans)


@pytest.mark.parametrize("name", CROSSED)
@pytest.mark.parametrize("release", PYTHONS)
def test_the_other_release_goes_on_with_a_run(release, name, first, second):
    run, whole = (first[release] / "1" / f"{name} {kind}" for kind in ("saved", "whole"))
    require_same_steps(run, whole, count=4, tolerance=5e-4)


def require_same_steps(run, expected, count: int = 2, tolerance: float = 1e-4) -> None:
    found, expected = steps_of(run), steps_of(expected)
    assert len(found) == len(expected) == count
    for own, other in zip(found, expected):
        assert own == pytest.approx(other, rel=tolerance)
