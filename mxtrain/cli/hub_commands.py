"""``mxtrain export`` and ``import``: runs as Hugging Face models, and back."""

from pathlib import Path

from mxtrain.cli import console

EXPORT = """\
Write a checkpoint of a run to a folder that Hugging Face's transformers read: safetensors, config.json,
generation_config.json and the tokenizer. Works on a CPU, for checkpoints of any number of processes, and reads one
weight after another. Models: llama3, qwen3 and deepseek_v3, as train_configs/MODELS.md says. The exported model
has RMSNorm and plain linears, whatever the run was trained with.

  mxtrain export outputs/llama3_debug-20261120-131838 exported/
  mxtrain export outputs/a exported/ --step 1000 --dtype bfloat16
  mxtrain export outputs/a exported/ --fold-gain      norms have gains of one; the next weights contain them
  mxtrain export outputs/a exported/ --format mxfp8   for vLLM: the codes and scales that training multiplied in fprop

--format mxfp8 and nvfp4 have compressed-tensors' layouts. Gains that training folded are folded; linears that trained
in high precision or in another format stay in --dtype.
"""
IMPORT = """\
Make a run's folder from a Hugging Face model, by transformers (pip install "mxtrain[hf]"): its weights as a checkpoint
(step 0), its tokenizer, and a config.toml with which to continue its training. Models: Llama, Qwen3 and DeepSeek V3
of any size, in safetensors files of fp32, bf16 or fp16. What differs from the nearest flavor is in [model_args].
Without --config the settings are those of a short continuation with MXNorm, and training.dataset_path names a little
Python source as an example: set it to your text.

  mxtrain import models/Qwen3-0.6B outputs/qwen
  mxtrain import models/Llama-3.1-8B outputs/llama --config train_configs/llama3_8b.toml
  mxtrain train outputs/qwen/config.toml
"""


def add(commands) -> None:
    """Add both commands to argparse's subcommands."""
    new = "it must not exist, or be empty"
    command = _command(commands, "export", _export, "write a run's weights as a Hugging Face model", EXPORT)
    command("source", metavar="RUN", type=Path, help="folder of a run, with config.toml and checkpoints")
    command("target", metavar="DIR", type=Path, help=f"folder to write; {new}")
    command("--step", type=int, help="step of the checkpoint (default: the newest complete one)")
    command("--format", default="hf", help="hf (the default: high precision), mxfp8 or nvfp4")
    command("--fold-gain", action="store_true", help="fold the gains of norms into the next linears")
    dtype = "of all tensors in high precision (default: float32; mxfp8, nvfp4: bfloat16)"
    command("--dtype", choices=("float32", "bfloat16"), help=dtype)

    command = _command(commands, "import", _import, "make a run's folder from a Hugging Face model", IMPORT)
    command("source", metavar="MODEL_DIR", type=Path, help="folder with config.json, safetensors, tokenizer")
    command("target", metavar="RUN_DIR", type=Path, help=f"folder to make; {new}")
    command("--config", dest="settings", metavar="FILE", type=Path, help="TOML file with the settings of the run")


def _command(commands, name: str, run, summary: str, description: str):
    """Add a command; return the function that adds an argument to it."""
    parser = commands.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=run)
    return parser.add_argument


def _export(options) -> int:
    console.hide_library_warnings()
    import torch

    from mxtrain.titan.hugging_face.export import export

    _, lines = export(
        options.source,
        options.target,
        step=options.step,
        format=options.format,
        fold_gain=options.fold_gain,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
    )
    print(lines)
    return 0


def _import(options) -> int:
    console.hide_library_warnings()
    import mxtrain.titan  # noqa: F401  registers the flavors
    from mxtrain.titan.hugging_face.import_model import import_model

    print(import_model(options.source, options.target, options.settings))
    return 0
