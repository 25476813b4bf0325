from dataclasses import replace

import pytest

from mxtrain.cli.paired_runs import Variant, joined, planned, planned_again, read_all, unpaired_settings, variant_of
from mxtrain.errors import ConfigError


@pytest.mark.parametrize(
    "words, expected",
    [
        ("llama3_debug", Variant("llama3_debug", "llama3_debug", [])),
        ("p1=llama3_debug --mxnorm.p 1", Variant("p1", "llama3_debug", ["--mxnorm.p", "1"])),
        ("a/b.toml --mxnorm.p=1", Variant("b-mxnorm.p-1", "a/b.toml", ["--mxnorm.p=1"])),
        ("outputs/mine/config.toml", Variant("mine", "outputs/mine/config.toml", [])),
        ("out/lr=3/x.toml", Variant("x", "out/lr=3/x.toml", [])),
    ],
)
def test_a_variant_is_a_config_with_a_name_and_flags(words, expected):
    assert variant_of(words) == expected


def test_a_config_may_have_an_equals_sign_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=3.toml").touch()
    assert variant_of("lr=3.toml") == Variant("lr-3", "lr=3.toml", [])


def test_every_variant_gets_every_rate_and_seed_and_the_variants_flags_come_last():
    runs = planned(["a=llama3_debug --mxnorm.p 1", "llama3_debug_fp32"], 2, ["0.001"], ["--mxnorm.p", "2"])
    assert list(runs) == [
        "a-lr0.001-seed0", "llama3_debug_fp32-lr0.001-seed0", "a-lr0.001-seed1", "llama3_debug_fp32-lr0.001-seed1",
    ]  # fmt: skip
    run = runs["a-lr0.001-seed1"]
    flags = ["--mxnorm.p", "2", "--mxnorm.p", "1", "--optimizer.lr=0.001", "--debug.seed=1"]
    assert (run.variant, run.arguments, run.status) == ("a", ["llama3_debug", *flags], None)
    assert list(planned(["llama3_debug"], 1, [], [])) == ["llama3_debug-seed0"]


@pytest.mark.parametrize(
    "variants, rates, flags, problem",
    [
        ([""], [], [], "VARIANT = '' names no config"),
        (["'llama3_debug"], [], [], "VARIANT = .* cannot be split into words: No closing quotation"),
        (["llama3_debug --job.description=" + "x" * 180], [], [], "has 215 bytes, and at most 200 .*write NAME=CONFIG"),
        (["\u00e9" * 110 + "=llama3_debug"], [], [], "has 226 bytes, and at most 200"),
        (["a=--x"], [], [], "VARIANT = 'a=--x' names no config"),
        (["llama3_debug", "llama3_debug"], [], [], "two runs have the name 'llama3_debug-seed0': write NAME=CONFIG"),
        (["llama3_debug --debug.seed 1"], [], [], "--debug.seed: 'mxtrain compare' sets it for every run"),
        (["llama3_debug"], [], ["--job.dump-folder=x"], "--job.dump-folder: 'mxtrain compare' sets it"),
        (["llama3_debug"], ["1"], ["--optimizer.lr=1"], "--optimizer.lr: 'mxtrain compare' sets it"),
        (["llama3_debug", "b=llama3_debug --mxnorm.p 3"], [], [], "mxnorm.p = "),
        (["llama3_debug --model.flavor=gone"], [], [], "model.flavor = 'gone'"),
        (["gone.toml"], [], [], "config 'gone.toml' does not exist"),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_any_run(variants, rates, flags, problem):
    with pytest.raises(ConfigError, match=problem):
        read_all(planned(variants, 1, rates, flags))


def test_a_comparison_grows_and_does_not_change(tmp_path):
    config = tmp_path / "a.toml"
    config.write_text("[training]\nsteps = 3\nseq_len = 64\n")
    first = planned([str(config)], 1, [], [])
    done = {name: type(run)(**{**vars(run), "status": 0}) for name, run in first.items()}
    more = joined(done, planned([str(config), "llama3_debug"], 2, [], []), "--output")
    assert [run.status for run in more.values()] == [0, None, None, None]
    with pytest.raises(ConfigError, match="--output: its run a-seed0 was begun with other flags .*; choose another"):
        joined(done, planned([str(config)], 1, [], ["--training.steps=4"]), "--output")
    config.write_text("[training]\nseq_len = 64\nsteps = 3\n")
    assert joined(done, planned_again(done), "--output") == done
    config.write_text("[training]\nsteps = 4\n")
    with pytest.raises(ConfigError, match="a-seed0 was begun before .*a.toml changed"):
        joined(done, planned_again(done), "--output")


def differing(runs):
    return unpaired_settings(runs, read_all(runs))


def test_variants_that_read_other_text_or_train_other_models_are_named():
    other = "b=llama3_debug --training.seq_len 256 --validation.steps 3 --model_args.rope_theta 1e4"
    line, validation, model = differing(planned(["llama3_debug", "llama3_debug_p1", other], 1, [], []))
    assert model == (
        "variants differ in model_args.rope_theta (default in llama3_debug and 1 more, 10000.0 in b): "
        "their models differ"
    )
    assert validation.startswith("variants differ in validation.steps (")
    assert line.startswith("variants differ in training.seq_len (128 in llama3_debug and 1 more, 256 in b)")


def test_variants_whose_layout_gives_other_sequences_per_step_are_named():
    flags = ["--training.local_batch_size=4"]
    halves = "b=llama3_debug --parallelism.tensor_parallel_degree 2"
    runs = {name: replace(run, gpus=2) for name, run in planned(["a=llama3_debug", halves], 1, [], flags).items()}
    (line,) = differing(runs)
    assert line.startswith("variants differ in training.global_batch_size (8 in a, 4 in b)")
    same = f"{halves} --training.global_batch_size 8"
    runs = {name: replace(run, gpus=2) for name, run in planned(["a=llama3_debug", same], 1, [], flags).items()}
    assert differing(runs) == []
