"""``mxtrain import``: a model of Hugging Face's transformers as a run to continue."""

import argparse
from pathlib import Path

from mxtrain.cli import quiet


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "import",
        help="make a run's folder from a Hugging Face model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Make a run's folder from a Hugging Face model: its weights as a checkpoint (step 0), its tokenizer, and a config.toml
with which to continue its training. Models: Llama and dense Qwen3 of any size, in safetensors files of fp32, bf16 or
fp16. What differs from the nearest flavor of llama3 or qwen3 is in [model_args]. Pickles (.bin, .pt) are never read.

  mxtrain import models/Qwen3-0.6B outputs/qwen
  mxtrain import models/Llama-3.1-8B outputs/llama --config train_configs/llama3_8b.toml
  mxtrain train outputs/qwen/config.toml

Without --config the settings are those of a short continuation with MXNorm on Python source; edit config.toml.
""",
    )
    parser.set_defaults(run=_import)
    parser.add_argument(
        "source", metavar="MODEL_DIR", type=Path, help="folder with config.json, safetensors, tokenizer"
    )
    parser.add_argument("target", metavar="RUN_DIR", type=Path, help="folder to make; it must not exist, or be empty")
    parser.add_argument(
        "--config", dest="settings", metavar="FILE", type=Path, help="TOML file with the settings of the run"
    )


def _import(options) -> int:
    quiet.hide_library_warnings()
    import mxtrain.titan  # noqa: F401  registers the flavors
    from mxtrain.titan.hugging_face.import_model import import_model

    print(import_model(options.source, options.target, options.settings))
    return 0
