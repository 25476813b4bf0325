"""A format from outside of mxtrain: a user's module declares its numbers, and everything else follows."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mxtrain import ConfigError, MXLinear, MXNorm, MXNormLinear, Recipe, cli
from mxtrain.formats import FORMATS, Format, register_format
from mxtrain.formats.recipe import RECIPES
from tests.support.forked import Forked
from tests.support.training_worker import free_port

TOY = Path(__file__).with_name("toy_format.py")
NAME = "toy"


@pytest.fixture
def toy(monkeypatch):
    """The recipe, known for the time of a test."""
    for known in (FORMATS, RECIPES):
        for name in list(known):
            monkeypatch.setitem(known, name, known[name])  # puts their order back, too
        monkeypatch.delitem(known, NAME, raising=False)
    exec(TOY.read_text(), {})
    yield RECIPES[NAME]
    for known in (FORMATS, RECIPES):
        known.pop(NAME)


def values(x: torch.Tensor) -> torch.Tensor:
    """x [R, C] in blocks of 16 along C, rounded to E5M2 with scales of 2^ceil(log2(amax / 57344))."""
    blocks = x.double().unflatten(-1, (-1, 16))
    scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 57344)))
    return ((blocks / scales).float().to(torch.float8_e5m2).double() * scales).flatten(-2)


@pytest.mark.parametrize("mode", ["reference", "emulated"])
def test_products_are_those_of_the_rounded_values(toy, mode):
    torch.manual_seed(0)
    layer = MXLinear(64, 96, bias=False, recipe=toy, mode=mode)
    x, w = torch.randn(32, 64), layer.weight.detach()
    want = values(x) @ values(w).t()
    assert (layer(x) - want).norm() <= 1e-6 * want.norm() and str(toy) == f"{NAME}/rceil"
    codes = toy.ops.encode(w, toy)
    assert torch.equal(toy.ops.dequantize(codes, torch.float64), values(w))
    # Where no tensor core multiplies codes, native operands are values.
    assert toy.ops.cast([x], toy, "native", (1,))[1].scales is None


def test_a_norm_and_its_linear_compile(toy):
    torch.manual_seed(0)
    norm, linear = MXNorm(64, recipe=toy), MXNormLinear(64, 96, recipe=toy)
    x = torch.randn(32, 64, requires_grad=True)
    results = []
    for call in (
        lambda x: linear(norm(x)),
        torch.compile(lambda x: linear(norm(x)), backend="aot_eager", fullgraph=True),
    ):
        y = call(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, norm.weight, linear.weight))])
    for eager, compiled in zip(*results):
        torch.testing.assert_close(eager, compiled)


def train() -> int:
    """What a worker of ``mxtrain train toy.toml`` does, without the seconds that the launcher and its imports take."""
    from mxtrain.titan.train import work

    sys.path.insert(0, "")
    os.environ["MASTER_PORT"] = free_port()
    Path("run").mkdir()
    return work(["--job.config_file=toy.toml", "--job.dump_folder=run", "--metrics.log_freq=1"], verbose=False)


def test_a_run_by_toml(tmp_path, toy, capsys, monkeypatch):
    """It trains compiled blocks, its plan names the recipe, and its weights are exported in high precision only."""
    shutil.copy(TOY, tmp_path)
    (tmp_path / "toy.toml").write_text(
        f'extends = "llama3_debug"\nexperimental.custom_import = "toy_format"\nmxnorm.recipe = "{NAME}"\n'
        "[training]\nsteps = 3\nseq_len = 64\n[data]\nmax_bytes = 100_000\n[model_args]\nn_layers = 1\n"
        '[compile]\nenable = true\nbackend = "aot_eager"\n'
        "[checkpoint]\nenable = true\ninterval = 3\n[validation]\nenable = false\n[metrics]\nenable_wandb = false\n"
    )
    training = Forked(train, cwd=tmp_path, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    out, err = training.communicate(400)
    assert training.process.exitcode == 0, err
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert f"mxnorm {NAME} p=" in out
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "toy_format", ModuleType("toy_format"))  # the fixture has registered the format
    for form, message in (
        (NAME, f"--format = '{NAME}' is not one of: 'hf', 'mxfp8', 'nvfp4', 'mxfp4'"),
        ("mxfp8", f"the linears have {NAME} or high-precision weights"),
    ):
        assert cli.main(["export", "run", "exported", "--format", form]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "exported").exists()


def test_names_that_are_taken_and_blocks_that_do_not_fit(toy):
    numbers = dict(element_max=448.0, element_max_exponent=8, element_bits=8, element="float8_e4m3fn")
    for make, message in (
        (lambda: register_format(Format(name="mxfp8", block_size=32, **numbers)), "'mxfp8' is already registered"),
        (lambda: register_format(None, Recipe("bf16", None, 32)), "'bf16' is already registered"),
        (lambda: register_format(Format(name="x", block_size=24, **numbers)), "block_size = 24 must divide 32"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
