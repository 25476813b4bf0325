"""Every mistake in the settings is one line and exit status 2, and leaves nothing behind."""

import re
import subprocess
import sys

import pytest
import tomli_w
from tokenizers import Tokenizer, models

from mxtrain import cli
from mxtrain.errors import ConfigError
from mxtrain.settings.read import places, read_settings

# What the message says about the allowed values -> flags out of range or of another type.
VALUES = {
    "1": "training.steps=0 lr_scheduler.total_steps=0 optimizer.beta1=1 lr_scheduler.decay_ratio=1.5",
    "0": "training.dataloader.num_workers=-1 optimizer.lr=-1 training.max_norm=nan model_args.rope_factor=0",
    "-1": "training.global_batch_size=0 checkpoint.load_step=-2",
    "32": "mxnorm.diagnostics.tokens=100",
    "finite": "optimizer.lr=inf",
    "18446744073709551616": "debug.seed=18446744073709551616",
    "16777216": "data.vocab_size=10000000000",
    "integer": "training.steps=3.5 training.steps=True training.steps= data.vocab_size=None",
    "number": "mxnorm.eps=small",
    "boolean": "mxnorm.hadamard=perhaps",
    "address": "checkpoint.initial_load_path=s3://b/run",
    "1 2": "mxnorm.p=True",
    "rceil floor": "mxnorm.scale_rounding=up",
    "bfloat16 float32": "training.dtype=float16",
    "op 1": "activation_checkpoint.selective_ac_option=0",
    "model optimizer lr_scheduler dataloader train_state": "checkpoint.exclude_from_loading=optim",
    "model loss": "compile.components=model,los",
    "1F1B GPipe Interleaved1F1B LoopedBFS": "parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
    "''": "parallelism.pipeline_parallel_schedule_csv=a.csv",
    "headtail ptrr": "parallelism.context_parallel_load_balancer=None",
    "mxfp8 unquantized nvfp4": "mxnorm.recipe=mxfp3",
}
# A flag with a name that does not exist -> the closest one.
UNKNOWN = {
    "mxnorm.q=2": "mxnorm.p",
    "training.lr=1e-3": "optimizer.lr",
    "trainig.steps=5": "training.steps",
    "checkpoint.not-enable": "checkpoint.enable",
    "training.no-steps": "training.steps",
    "mxnrm.filter_fqns=wo": "mxnorm.filter_fqns",
}
# Flags -> facts in the message, between bars; it begins with the first one
FLAGS = {
    "training.steps=5": "'training.steps=5' | --section.name VALUE",
    "--training.steps 5 --training.seq_len": "training.seq_len needs a value",
    "--training.steps 5 6": "training.steps | one value | 5 6",
    "--model.converters mxnorm fused_norm": "model.converters | mxnorm,fused_norm",
    "--checkpoint.no-enable yes": "checkpoint.enable | no value | --checkpoint.no-enable",
    "--job.custom_config_module=no.such": "job.custom_config_module = 'no.such' | No module named 'no'",
    # Recipes
    "--mxnorm.recipe=fprop=nvfp4": "mxnorm.recipe = 'fprop=nvfp4' | dgrad | wgrad",
    "--mxnorm.recipes wo fprob=bf16": "mxnorm.recipes.'wo' = 'fprob=bf16' | fprop",
    "--mxnorm.recipes wo": "mxnorm.recipes | pairs | wo",
    "--mxnorm.tensor_scale=static": "mxnorm.tensor_scale = 'static' | nvfp4",
    "--mxnorm.recipe=nvfp4 --mxnorm.estimator=post_round": "mxnorm.estimator = 'post_round'",
    "--mxnorm.fsdp_gather=quantized": "mxnorm.fsdp_gather = 'quantized' | 'mxfp8' | mxnorm.weight_tiles = true",
    "--mxnorm.fsdp_gather=quantized --mxnorm.recipe=mxfp8_2d --mxnorm.mode=fp8_merged": "mxnorm.fsdp_gather = | "
    "mxnorm.mode = 'fp8_merged' round weights twice",
    "--mxnorm.fsdp_gather=quantized --mxnorm.recipe=nvfp4": "mxnorm.fsdp_gather = 'quantized' | element of the whole",
    "--mxnorm.fsdp_gather=quantized --mxnorm.recipe=mxfp8_2d --training.enable_cpu_offload": "mxnorm.fsdp_gather = | "
    "unset training.enable_cpu_offload",
    "--mxnorm.fsdp_gather=quantized --mxnorm.recipe=mxfp8_2d --mxnorm.diagnostics.every=2": "mxnorm.fsdp_gather | = 2;",
    # Schedules
    "--mxnorm.schedule {from_step=": "mxnorm.schedule[0] = '{from_step=' | inline table",
    '--mxnorm.schedule {from_step=3,norm="rmsnorm"} {from_step=3,modulez=["wo"]}': "mxnorm.schedule[1] | modulez",
    '--mxnorm.schedule {from_step=3,norm="x"}': "mxnorm.schedule[0].norm = 'x' | 'rmsnorm'",
    '--training.steps=9 --mxnorm.schedule {from_step=10,recipe="bf16"}': "mxnorm.schedule[0].from_step = 10 | to 9",
    '--model.converters=mx_linear --mxnorm.schedule {from_step=1,norm="rmsnorm"}': "mxnorm.schedule[0].norm | not 'mx_",
    # Settings that do not go together
    "--model.converters=mxnorm,mxnorm": "model.converters = ['mxnorm', 'mxnorm'] | twice",
    "--model.converters=mxnorm,mx_linear": "model.converters = | has 'mxnorm' and 'mx_linear'",
    "--model.converters=mxnorm,quantize.linear.mx": "model.converters = | 'mxnorm' and 'quantize.linear.mx'",
    "--model.converters=decompose_k_router,quantize.linear.mx": "model.converters = | linear.mx.filter_fqns",
    "--validation.enable --training.seq_len=50 --validation.seq_len=64": "validation.seq_len = 64 | seq_len = 50",
    "--lr_scheduler.total_steps=5 --training.steps=6": "lr_scheduler.total_steps = 5 | training.steps = 6",
    "--checkpoint.load_step=7": "checkpoint.load_step = 7 | checkpoint.enable = true",
    "--checkpoint.initial_load_in_hf_quantized": "checkpoint.initial_load_in_hf_quantized = True | in_hf = true",
    "--checkpoint.enable --checkpoint.last_save_in_hf": "checkpoint.last_save_in_hf = True | mxtrain export",
    "--checkpoint.enable --checkpoint.may_change=mxnorm.p,mxnorm.q": "checkpoint.may_change | mxnorm.q is not",
    "--checkpoint.enable --checkpoint.exclude_from_loading=train_state,dataloader": "checkpoint.exclude_ | 'lr_sch",
    "--checkpoint.enable --checkpoint.folder=a/../../b": "checkpoint.folder = 'a/../../b' | job.dump_folder",
    "--checkpoint.export_dtype=bfloat16": "checkpoint.export_dtype = 'bfloat16' | checkpoint.last_save_model_only",
    "--optimizer.early_step_in_backward": "optimizer.early_step_in_backward = True | steps after the backward",
    # The model
    "--model_args.head_dim=64": "model_args.head_dim = 64 | 'llama3' | dim, n_layers, n_heads",
    "--model.name=gpt_oss --model_args.dim=64": "model_args.dim = 64 | 'gpt_oss' | llama3, llama4, qwen3",
    "--model_args.max_seq_len=1024": "model_args.max_seq_len = 1024 | training.seq_len = 2048",
}
# Mistakes that show with the names that are registered, the model, the text or the machine -> facts
LATER = {
    "--mxnorm.filter_fqns=layers.99": "mxnorm.filter_fqns: 'layers.99' matches no module | layers.0 ... layers.5",
    "--mxnorm.diagnostics.every=1 --mxnorm.diagnostics.fqns=layers.99": "mxnorm.diagnostics.fqns = ['layers.99']",
    "--model_args.hidden_dim=600": "layers.0.feed_forward.w1: out_features = 600 | 32 | filter_fqns",
    "--parallelism.tensor_parallel_degree=2": "parallelism.tensor_parallel_degree = 2  | 1 process | tensor 2",
}
# Tables of a TOML file, facts of the message, which begins with the first one, and the line that it names
TABLES = [
    ({"mxnorm": 3}, ["mxnorm = 3", "[mxnorm]"], 1),
    ({"training": {"dataloader": 2}}, ["training.dataloader = 2", "[training.dataloader]"], 2),
    ({"mxnorm": {"p": True}}, ["mxnorm.p = True", "integer"], 2),
    ({"mxnorm": {"recipes": {"layers": {"0": "bf16"}}}}, ["mxnorm.recipes.layers = {'0': 'bf16'}", "string"], None),
    ({"mxnorm": {"schedule": [{"q": 3}]}}, ["mxnorm.schedule[0] = {'q': 3}", "from_step, from_share"], None),
    ({"model": {"converters": "mxnorm"}}, ["model.converters = 'mxnorm'", "list"], 2),
    ({"model_args": {"dim": 64, "top_k": 2}}, ["model_args.top_k = 2", "'llama3'"], 3),
    ({"training": {"steps": {"n": 3}}}, ["training.steps = {'n': 3}", "integer"], None),
    ({"job": {"dump_folder": "a\0b"}}, [r"job.dump_folder = 'a\x00b'"], None),
    ({"steps": 3}, ["steps is not a setting", "training.steps"], 1),
    ({"mxnrm": {"p": 1}}, ["mxnrm is not a table of settings; did you mean [mxnorm]?"], 1),
    ({"mxnorm": {"recips": {"wo": "bf16"}}}, ["mxnorm.recips is not a table", "did you mean [mxnorm.recipes]?"], 1),
    ({"mine": {"p": 1}}, ["mine is not a table of settings; tables of your own need job.custom_config_module"], 1),
    ({"extends": "nowhere.toml"}, ["config 'nowhere.toml'"], None),
]
HUGE = "x" * 1_000_000


def message_of(flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        read_settings(["--model.converters=mxnorm", *flags.split()])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs ``mxtrain train`` in an empty folder; returns the message after checking status and leftovers."""
    monkeypatch.chdir(tmp_path)
    for name in ("NGPU", "MXTRAIN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mxtrain.cli.launch.accelerator_count", lambda: 0)
    monkeypatch.setattr("mxtrain.cli.train_command.hide_library_warnings", lambda: None)

    def refused(config, flags=""):
        (tmp_path / "a.toml").write_text(tomli_w.dumps(config))
        assert cli.main(["train", "a.toml", *flags.split()]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]
        prefix, message = line[:16], line[16:]
        assert prefix == "mxtrain: error: "
        return message

    return refused


CONVERTED = {"model": {"converters": ["mxnorm"]}}


def test_values_that_are_not_allowed():
    for flag, allowed in ((flag, allowed) for allowed, flags in VALUES.items() for flag in flags.split()):
        name, _, value = flag.partition("=")
        message = message_of(f"--{flag}")
        shown = re.match(rf"{re.escape(name)}(\[\d\])? = '?{re.escape(value.split(',')[-1])}(\.0)?'? ", message)
        assert shown, message
        for word in allowed.split():
            assert re.search(rf"(?<![\w.-]){word}(?![\w.])", message[shown.end() :]), message


def test_names_that_do_not_exist():
    for flag, closest in UNKNOWN.items():
        message = message_of(f"--{flag}")
        assert message.startswith(f"{flag.partition('=')[0].replace('-', '_')} is not a setting"), message
        assert message.endswith(f"; did you mean {closest}?"), message


def test_flags():
    for flags, facts in FLAGS.items():
        message, facts = message_of(flags), facts.split(" | ")
        assert message.startswith(facts[0]) and all(fact in message for fact in facts), message


@pytest.mark.parametrize("flags", LATER)
def test_mistakes_that_show_with_model_text_or_machine(refused, flags):
    message = refused(CONVERTED, flags)
    assert all(fact in message for fact in LATER[flags].split(" | "))


def test_tables(refused):
    for tables, facts, line in TABLES:
        message = refused(tables)
        assert message.startswith(facts[0]) and all(fact in message for fact in facts), message
        assert line is None or message.endswith(f" (a.toml, line {line})"), message


def test_an_enormous_value_is_cut(refused):
    for tables, begin in (
        ({"training": {HUGE: 1}}, "training.xxx"),
        ({"mxnorm": {"recipe": HUGE}, **CONVERTED}, "mxnorm.recipe = 'xxx"),
        ({"extends": HUGE}, "config 'xxx"),
    ):
        message = refused(tables)
        assert message.startswith(begin) and len(message) < 2100


def test_files_that_cannot_be_used_are_found_before_a_text_is_read(refused, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name in ("a.jsonl", "b.txt"):
        (folder / name).write_text("")
    Tokenizer(models.WordLevel({"a": 0})).save(str(folder / "tokenizer.json"))
    mixed, flags = f"_path = '{folder}' mixes formats", f"--training.dataset=files --training.dataset_path={folder}"
    assert refused(CONVERTED, flags).startswith(f"training.dataset{mixed}")
    flags = flags.replace("training", "validation")
    assert refused(CONVERTED, f"--validation.enable {flags}").startswith(f"validation.dataset{mixed}")
    for tokenizer, fact in ((folder, "neither a bos nor an eos token"), (folder / "a.jsonl", "is not a folder")):
        setting = f"model.hf_assets_path = '{tokenizer}' "
        message = refused(CONVERTED, f"--model.hf_assets_path={tokenizer}")
        assert message.startswith(setting) and fact in message


def test_a_converter_without_work_is_found_before_a_text_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "llama3_debug", "--model.converters=decompose_k_router"]) == 2
    assert "'decompose_k_router' finds nothing to convert" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_a_file_that_is_extended_names_that_file(refused, tmp_path, monkeypatch):
    (tmp_path / "bases").mkdir()
    base = tmp_path / "bases" / "base.toml"
    base.write_text("# A base.\n\n[training]\nseq_len = 64\nsteps = 0  # none\n")
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda self: iter([tmp_path / "a.toml"]))
    assert refused({"extends": "bases/base.toml", "training": {"seq_len": 32}}).endswith("(bases/base.toml, line 5)")
    # A flag has no line; it is not blamed on the file.
    assert not refused({"extends": "bases/base.toml"}, "--training.steps=-1").endswith(")")
    base.write_text("[checkpoint]\nenable = true\n")
    with pytest.raises(ConfigError) as error, places(["--job.config_file=bases/base.toml", "--checkpoint.no-enable"]):
        raise ConfigError("checkpoint.enable = False, but")
    assert str(error.value) == "checkpoint.enable = False, but"


def test_stages_that_the_user_names(refused, monkeypatch):
    """TorchTitan trains another model with layers that no stage has, or with stages that its schedule does not run."""
    monkeypatch.setenv("NGPU", "2")
    whole = ["tok_embeddings", *(f"layers.{number}" for number in range(6)), "norm", "output"]
    for parts, fact in {
        (5, 6): "layers.0 to layers.5",
        (8, 8): "norm and output",
        (0, 0): "module in every stage",
    }.items():
        stages = {"parallelism": {"module_fqns_per_model_part": [whole[: parts[0]], whole[parts[1] :]]}}
        message = refused(stages, "--parallelism.pipeline_parallel_degree=2")
        assert message.startswith("parallelism.module_fqns_per_model_part = [[") and fact in message
    three = " ".join(",".join(part) for part in (whole[:3], whole[3:5], whole[5:]))
    flags = f"--parallelism.pipeline_parallel_degree=2 --parallelism.module_fqns_per_model_part {three}"
    assert "has 3 stages, and schedule 1F1B needs 2" in refused({}, flags)


WITHOUT_PYTORCH = """
import sys
from mxtrain import cli

for words in sys.argv[1:]:
    status = cli.main(["train", *words.split()])
    assert status == (0 if "--help" in words else 2) and not {"torch", "torchtitan"} & sys.modules.keys(), words
"""


def test_mistakes_and_the_help_show_without_an_import_of_pytorch(tmp_path):
    """An import takes seconds. TorchTitan's settings are read from its source."""
    (tmp_path / "a.toml").write_text('extends = "llama3_debug"\n[training]\nseq_len = 0\n')
    words = ["a.toml", "llama3_debug --training.stepz 3", "llama3_debug --validation.enable --validation.seq_len=9999"]
    command = [sys.executable, "-c", WITHOUT_PYTORCH, *words, "llama3_debug --help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == len(words), done.stderr
    assert "(a.toml, line 3)" in done.stderr
