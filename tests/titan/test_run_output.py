"""What runs show on the terminal, write into their folders, and measure in themselves."""

import re

import pytest

from mxtrain.analysis import load_run
from mxtrain.analysis.numerics import by_figure
from mxtrain.titan.releases import RELEASE
from tests.support.training_runs import NUMERICS, NVFP4, REPOSITORY, done_once, steps

COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
DEGREE = "--parallelism.{}_parallel_degree=2"
LAYOUTS = {
    "compiled, fsdp": [*COMPILED, "--training.local_batch_size=2"],
    "tensor": [NVFP4, DEGREE.format("tensor"), "--activation_checkpoint.mode=selective", "--mxnorm.gather=quantized"],
    "context": [DEGREE.format("context"), "--training.seq_len=128"],
}
NUMBER = r"\d+\.\d{4}"
SEPARATORS = r"each document begins with '.*' and ends with '.*'"
TEXT = rf"text: [\d,]+ documents, \d+\.\d MB; {SEPARATORS}(; left out: .*)?"
MODEL = (
    r"(llama3|deepseek_v3) \w+( with \[model_args\])?: [\d,]+ parameters, CPU \(.*\), \d process(es)?, "
    r"float32 compute, float32 parameters"
)
CONVERTED = r"mxnorm \w+ p=\d, mode reference: .*; details in .*/conversion\.txt"
SUMMARY = [
    r"run +.* \(.*\)",
    rf"loss +{NUMBER} -> {NUMBER}, "
    rf"((fell|rose|unchanged) over \d+ steps \(mean of the last 10 %: {NUMBER}\)|\d of \d steps logged)",
    rf"(validation +{NUMBER} at step \d+)?",
    r"tokens/s +[\d,]+( per device, [\d,]+ on \d)?",
    r"memory +\d+\.\d\d GiB peak",
    r"folder +.*",
    r"loss curve +.*/loss\.png",
]


def require_lines(text: str, patterns: list[str]) -> None:
    """Every line matches its pattern, in order. Patterns that match the empty line may be absent."""
    lines = text.splitlines()
    for pattern in patterns:
        if lines and re.fullmatch(pattern, lines[0]):
            lines.pop(0)
        else:
            assert re.fullmatch(pattern, ""), (pattern, text)
    assert not lines, text


def begin(text: list[str]) -> list[str]:
    """The lines about text and model. TorchTitan 0.3 builds the model first."""
    model = [CONVERTED, MODEL]
    return [*text, *model] if RELEASE == "v02" else [*model, *text]


def step(number: int, of: int, left: bool, each: str = "") -> str:
    speed = rf"[\d,]+ tokens/s{each}" + r"  [\d:]+ left" * left
    return rf"step +{number}/{of}  loss {NUMBER}  grad norm [\d.]+  {speed}"


def validation(number: int, of: int) -> str:
    return rf"step +{number}/{of}  validation loss {NUMBER}"


def test_mxtrain_train_prints_what_a_person_reads(command_run):
    out, err = command_run.output
    assert command_run.statuses == [0] and err == "", err
    folder = re.escape(str(command_run.folder))
    prepared = [r"preparing dataset 'files' in .*", r"training a byte-level BPE .*", r"merging .*"]
    tokenized = [r"tokenizing .*", r"prepared .*"]
    more_text = [r"preparing dataset 'files' in .*", *tokenized]
    lines = [
        rf"mxtrain: run folder {folder}",
        r"no checkpoints: nothing can resume or export this run; --checkpoint\.enable saves checkpoints",
        *begin([*prepared, *tokenized, TEXT]),
        *more_text,
        rf"text for validation{TEXT.removeprefix('text')}",
        step(1, 4, left=False),
        validation(1, 4),
        step(2, 4, left=True),
        validation(3, 4),
        step(4, 4, left=False),
        validation(4, 4),
        *SUMMARY,
        r"wandb +offline; upload with: wandb sync .*",
    ]
    require_lines(out, lines)


def test_files_of_a_run_hold_the_rest_as_plain_text(command_run):
    for path in command_run.folder.glob("*.*"):
        if path.suffix != ".png":
            assert "\x1b" not in path.read_text(), path
    log = (command_run.folder / "train.log").read_text()
    for text in ("Training starts at step 1", "total parameters", "step:  4  loss: ", "validate step:  3", "mfu: nan%"):
        assert text in log
    conversion = (command_run.folder / "conversion.txt").read_text()
    assert re.match(r"mxnorm mxfp8 p=2, mode reference: .*\n", conversion) and conversion in log
    assert "layers.0.ffn_norm: MXNorm, feeds w1, w3" in conversion and "output" in conversion


def test_the_readme_names_what_a_run_writes(command_run):
    [paragraph] = re.findall(r"^A run writes .*?\n\n", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    for path in command_run.folder.glob("[!.]*"):
        assert f"`{path.name}{'/' * path.is_dir()}`" in paragraph


def test_only_the_first_process_writes_to_the_terminal(several):
    first, second = several["fsdp"].output
    each = " per device"
    require_lines(first, [*begin([TEXT]), step(1, 2, False, each), step(2, 2, False, each), *SUMMARY])
    assert second == ""
    assert "Training starts at step 1" in (several["fsdp"].folder / "worker_logs" / "rank1.log").read_text()
    assert "2 processes" in first


def test_libraries_do_not_warn_a_user(one, several):
    runs = [*one.items(), *several.items()]
    found = {name: re.findall(r"^warning: .*Warning: .*", run.output[0], re.MULTILINE) for name, run in runs}
    assert not any(found.values()), found


def test_verbose_brings_back_torchtitans_lines(one):
    run = one["mxnorm again"]
    text = run.output[0]
    for line in (
        "Training starts at step 1",
        "mxnorm mxfp8 p=2",
        "step:  3",
        "Training completed",
        "validate step:  2",
    ):
        assert re.search(rf"^\[titan\] .* - root - INFO - {line}", text, re.MULTILINE), line
    assert "layers.0-1.attention_norm: " in text and "step 1/3" not in text and "\x1b" not in text
    assert "Training completed" in (run.folder / "train.log").read_text()
    require_lines("\n".join(text.splitlines()[-7:]), SUMMARY)


def figures_in(outcome) -> list[dict]:
    assert set(outcome.statuses) == {0}, outcome.output[0][-4000:]
    return load_run(outcome.folder).numerics


def require_equal_training(on, off, steps: int = 2) -> None:
    ours, theirs = ([(row["step"], row["loss"], row["grad_norm"]) for row in outcome.rows] for outcome in (on, off))
    assert ours == theirs and len(ours) == steps


def test_figures_of_all_modules_are_logged_and_training_is_the_same(one):
    """The microbatches that ran before this run resumed had no diagnostics, nor had the run that is compared."""
    (row,) = figures_in(one["microbatches, resumed"])
    found = by_figure([row])
    assert row["step"] == 2 and list(found["rms_ratio_mean"].index[:2]) == [
        "layers.0.attention_norm",
        "layers.0.ffn_norm",
    ]
    assert len(found["fprop_error"]) == 14 and found["fprop_error"].loc["layers.0.attention.wq"].between(0, 0.3).all()
    assert not figures_in(one["microbatches"])
    require_equal_training(one["microbatches, resumed"], one["microbatches"])


def test_experts_and_their_routers_have_figures(one):
    found = by_figure(figures_in(one["qwen3, resumed"]))
    layers = ["layers.0.moe", "layers.1.moe"]
    assert list(found["fprop_error_worst_expert"].index) == [f"{layer}.experts" for layer in layers]
    assert list(found["routing_agreement"].index) == [f"{layer}.router" for layer in layers]
    shares = found["routing_agreement"].to_numpy()
    assert shares.shape == (2, 3) and (shares > 0.8).all() and (shares <= 1).all()


def test_fsdp_has_the_figures_of_all_ranks_and_trains_the_same(several):
    (row,) = figures_in(several["nvfp4, fsdp, resumed"])
    assert len(by_figure([row])["grad_norm_to_noise"]) == 15  # the model's is one of them
    require_equal_training(several["nvfp4, fsdp, resumed"], several["nvfp4, fsdp"])


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_figures_and_trains_the_same(base, name):
    runs = {
        f"{layout}, {state}": [*flags, steps(2), *(NUMERICS if state == "on" else [])]
        for layout, flags in LAYOUTS.items()
        for state in ("on", "off")
    }
    found = done_once(base, "diagnostics on two processes", 2, runs)
    (row,) = figures_in(found[f"{name}, on"])
    assert len(by_figure([row])["grad_norm_to_noise"]) == 15 and len(by_figure([row])["rms_r2"]) == 4
    require_equal_training(found[f"{name}, on"], found[f"{name}, off"])
