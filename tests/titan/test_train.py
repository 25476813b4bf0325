"""The trainer from end to end, in processes of its own."""

import json
import statistics

import pytest
import tomli
import tomli_w
import torch
from training_runs import CONFIG, launch, train

from mxtrain import ConfigError
from mxtrain.titan.train import non_default_values, parse_job_config

TEXT = CONFIG["training"]["dataset_path"]
VARIANTS = {
    "mxnorm": [],
    "exact": ["--mxnorm.estimator=exact"],
    "post_round": ["--mxnorm.estimator=post_round"],
    "mx_linear": ["--model.converters=mx_linear"],
    "mixed": ["--mxnorm.recipe=fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8", "--mxnorm.recipes", "layers.0", "bf16"],
    "high_precision": ["--model.converters="],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dozen_steps_lower_the_loss(tmp_path, variant):
    rows = train(tmp_path / variant, *VARIANTS[variant], "--training.steps=12")
    losses = [row["loss"] for row in rows]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert statistics.mean(losses[-3:]) < losses[0] - 0.4
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("name", "flavor", "converters"),
    [
        ("deepseek_v3", "debugmodel", "decompose_k_router"),
        ("qwen3", "debugmodel_moe_16", "mxnorm,decompose_k_router"),
        ("llama4", "debugmodel", "decompose_k_router"),
    ],
)
def test_mixtures_of_experts_learn(tmp_path, name, flavor, converters):
    flags = [f"--model.name={name}", f"--model.flavor={flavor}", f"--model.converters={converters}"]
    validation = ["--validation.enable", "--validation.dataset=files", f"--validation.dataset_path={TEXT}"]
    validation += ["--validation.seq_len=64", "--validation.local_batch_size=4", "--validation.freq=10"]
    steps = ["--training.steps=10", "--validation.steps=1", "--optimizer.lr=1e-3"]
    rows = train(tmp_path / name, *flags, *validation, *steps)
    assert statistics.mean(row["loss"] for row in rows[-2:]) < rows[0]["loss"] - 0.2
    assert all(row["grad_norm"] > 0 for row in rows)


def test_p1_and_p2_start_alike_and_differ_and_a_seed_fixes_the_curve(tmp_path):
    first, p1, again = (
        [row["loss"] for row in train(tmp_path / name, f"--mxnorm.p={p}", "--training.steps=3")]
        for name, p in (("first", 2), ("p1", 1), ("again", 2))
    )
    assert p1 != first and p1[0] == pytest.approx(first[0], rel=0.01)
    assert again == first


def test_resolved_config_holds_flags_and_runs_under_torchtitan_alone(tmp_path):
    first = train(tmp_path / "first", "--training.steps=3", "--mxnorm.p=1")
    with open(tmp_path / "first" / "config.toml", "rb") as file:
        resolved = tomli.load(file)
    assert resolved["mxnorm"] == {"p": 1} and resolved["training"]["steps"] == 3
    assert resolved["model"]["converters"] == ["mxnorm"]
    resolved["job"].pop("dump_folder")
    again = train(tmp_path / "again", module="torchtitan.train", config=resolved)
    assert [row["loss"] for row in again] == [row["loss"] for row in first]


def test_a_run_records_its_recipes_and_its_config_runs_again(tmp_path):
    recipe, recipes = "fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4", {"layers.*.feed_forward.w2": "mxfp8", "layers.0": "bf16"}
    config = CONFIG | {"mxnorm": {"recipe": recipe, "recipes": recipes}}
    first = train(tmp_path / "first", "--training.steps=2", config=config)
    resolved = tomli.loads((tmp_path / "first" / "config.toml").read_text())
    assert resolved["mxnorm"] == config["mxnorm"] and list(resolved["mxnorm"]["recipes"]) == list(recipes)
    facts = json.loads((tmp_path / "first" / "run.json").read_text())
    assert facts["recipe"] == recipe and facts["recipes"] == recipes
    assert all(row["grad_norm"] > 0 for row in first)
    resolved["job"].pop("dump_folder")
    again = train(tmp_path / "again", config=resolved)
    assert [row["loss"] for row in again] == [row["loss"] for row in first]


IN_PARSING = {
    "recipe": (["--mxnorm.recipe=mxfp3"], "recipe = 'mxfp3' is not one of: 'mxfp8', 'unquantized'"),
    "recipe of a GEMM": (["--mxnorm.recipe=fprop=mxfp8,dgrad=mx,wgrad=bf16"], "dgrad = 'mx' is not one of: 'mxfp8',"),
    "recipe of some": (["--mxnorm.recipe=fprop=nvfp4"], "recipe = 'fprop=nvfp4' says nothing of dgrad and wgrad"),
    "recipe by name": (["--mxnorm.recipes", "wo", "fprob=bf16"], "recipes.'wo' = 'fprob=bf16': GEMM = 'fprob' is not"),
    "p": (["--mxnorm.p=7"], "p = 7 is not one of: 1, 2"),
    "estimator": (["--mxnorm.estimator=mean"], "estimator = 'mean' is not one of"),
    "scale rounding": (["--mxnorm.scale_rounding=up"], "scale_rounding = 'up' is not one of: 'rceil', 'floor'"),
    "eps": (["--mxnorm.eps=-1"], "eps = -1.0 is not a finite number >= 0"),
    "missing mode": (["--mxnorm.mode=native"], "mode = 'native' cannot run here"),
    "unknown mode": (["--mxnorm.mode=warp"], "mode = 'warp' is not one of: 'auto', 'native', 'emulated', 'reference'"),
    "converter": (["--model.converters=mxnrom"], "model.converters = 'mxnrom' is not one of"),
    "two converters": (["--model.converters=mxnorm,mx_linear"], "choose one of ['mxnorm', 'mx_linear']"),
    "model": (["--model.name=llama9"], "model.name = 'llama9' is not one of"),
    "flavor": (["--model.flavor=9B"], "model.flavor = '9B' is not one of"),
    "validation length": (
        ["--validation.enable", "--validation.seq_len=128", "--training.seq_len=64"],
        "validation.seq_len = 128 is more than training.seq_len = 64",
    ),
    "config file": (["--job.config_file=/no/such.toml"], "'/no/such.toml' does not exist"),
}


@pytest.mark.parametrize("mistake", IN_PARSING)
def test_mistakes_found_before_anything_is_built(mistake, monkeypatch):
    # As on a machine without a GPU, which is where "native" is missing.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("torchtitan.tools.utils.device_type", "cpu")
    flags, message = IN_PARSING[mistake]
    with pytest.raises(ConfigError) as error:
        parse_job_config(["--model.converters=mxnorm", *flags])
    assert message in str(error.value)


IN_BUILDING = {
    "filter": (["--mxnorm.filter_fqns=outputs"], "filter_fqns: 'outputs' matches no module"),
    "recipe by name": (["--mxnorm.recipes", "layer.0", "bf16"], "recipes: 'layer.0' matches no module; the top-level"),
    "nothing to convert": (["--mxnorm.filter_fqns=layers,output"], "finds nothing to convert"),
    "dataset": (["--training.dataset=wiki"], "training.dataset"),
    "dataset path": (["--training.dataset_path=/no/such/text.jsonl"], "/no/such/text.jsonl"),
    "tokenizer": (["--model.hf_assets_path=/no/such/tokenizer"], "model.hf_assets_path"),
    "pipeline": (["--parallelism.pipeline_parallel_degree=2"], "pipeline_parallel_degree = 2"),
}


@pytest.mark.parametrize("mistake", IN_BUILDING)
def test_mistakes_are_told_in_one_line_before_training(tmp_path, mistake):
    flags, message = IN_BUILDING[mistake]
    processes = launch(tmp_path, *flags, processes=2 if mistake == "pipeline" else 1)
    assert {p.returncode for p in processes} == {2}, processes[0].stdout[-3000:]
    errors = [line for line in processes[0].stdout.splitlines() if line.startswith("mxtrain: error: ")]
    assert len(errors) == 1 and message in errors[0], processes[0].stdout[-3000:]
    assert "Traceback" not in processes[0].stdout
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": {"converters": "mxnorm"}}, "model.converters = 'mxnorm' is not a list"),
        ({"model": {"converters": ["mxnorm"]}, "mxnorm": {"p": "2"}}, "p = '2' is not one of: 1, 2"),
        ({"mxnorm": {"q": 2}}, "config: 'q' is not a field of"),
        (
            {"model": {"converters": ["mxnorm"]}, "mxnorm": {"recipes": {"layers": {"0": "bf16"}}}},
            "recipes.'layers' = {'0': 'bf16'} is not a string: write a pattern with dots in quotes",
        ),
        ({"model": {"converters": ["mxnorm"]}, "mxnorm": {"recipes": "bf16"}}, "recipes = 'bf16' is not a table"),
        ({"mxnrom": {"p": 2}}, "config: 'mxnrom' is not a field of top level"),
    ],
)
def test_mistakes_in_a_file(tmp_path, config, message):
    file = tmp_path / "job.toml"
    file.write_bytes(tomli_w.dumps(config).encode())
    with pytest.raises(ConfigError, match=message):
        parse_job_config([f"--job.config_file={file}"])


def test_a_config_that_extends_another(tmp_path):
    (tmp_path / "base.toml").write_text('[mxnorm]\np = 2\nestimator = "exact"\n')
    (tmp_path / "variant.toml").write_text('extends = "base.toml"\n[mxnorm]\np = 1\n')
    job_config = parse_job_config(["--job.config_file", str(tmp_path / "variant.toml"), "--mxnorm.eps", "1e-6"])
    assert (job_config.mxnorm.p, job_config.mxnorm.estimator, job_config.mxnorm.eps) == (1, "exact", 1e-6)


def test_only_what_differs_from_the_defaults_is_written():
    job_config = parse_job_config(["--training.dataloader.num_workers=2", "--mxnorm.filter_fqns=output,wo"])
    assert non_default_values(job_config) == {
        "training": {"dataloader": {"num_workers": 2}},
        "mxnorm": {"filter_fqns": ["output", "wo"]},
    }
