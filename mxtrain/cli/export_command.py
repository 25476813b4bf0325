"""``mxtrain export``: a run as a model of Hugging Face's transformers."""

import argparse
from pathlib import Path

from mxtrain.cli import quiet
from mxtrain.errors import ConfigError, require_one_of

LOSS_TOKENS = 16384
DTYPES = ("float32", "bfloat16")


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "export",
        help="write a run's weights as a Hugging Face model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Write a checkpoint of a run to a folder that Hugging Face's transformers read: safetensors, config.json,
generation_config.json and the tokenizer. Works on a CPU, for checkpoints of any number of processes, and reads one
weight after another. Models: llama3 and qwen3.

  mxtrain export outputs/llama3_debug-20261120-131838 exported/
  mxtrain export outputs/a exported/ --step 1000 --dtype bfloat16
  mxtrain export outputs/a exported/ --fold-gain      norms have gains of one; the next weights contain them

The exported model has RMSNorm and plain linears, whatever the run was trained with. The command prints the loss on
held-out text of both: as trained, with the run's converters, and as exported. DIR/mxtrain.json keeps both.

--format mxfp8 and nvfp4 write the codes and scales that training multiplied in fprop, in compressed-tensors' layouts,
which vLLM reads (transformers too, with compressed-tensors installed). Gains that training folded are folded; linears
that trained in high precision or in another format stay in --dtype.

  mxtrain export outputs/a exported/ --format mxfp8
""",
    )
    parser.set_defaults(run=_export)
    parser.add_argument("source", metavar="RUN", type=Path, help="folder of a run, with config.toml and checkpoints")
    parser.add_argument("target", metavar="DIR", type=Path, help="folder to write; it must not exist, or be empty")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest complete one)")
    parser.add_argument("--format", default="hf", help="hf (the default: high precision), mxfp8 or nvfp4")
    parser.add_argument("--fold-gain", action="store_true", help="fold the gains of norms into the next linears")
    parser.add_argument(
        "--dtype",
        help="float32 or bfloat16, of all tensors in high precision (default: float32; mxfp8, nvfp4: bfloat16)",
    )
    parser.add_argument(
        "--loss-tokens",
        metavar="N",
        type=int,
        default=LOSS_TOKENS,
        help=f"held-out tokens on which to compare the losses (default: {LOSS_TOKENS}; 0 computes none)",
    )
    parser.add_argument("--device", default="", help="where to compute the losses: cpu or cuda (default: a GPU if any)")


def _export(options) -> int:
    if options.dtype is not None:
        require_one_of("--dtype", options.dtype, DTYPES)
    require_one_of("--device", options.device, ("", "cpu", "cuda"))
    if options.loss_tokens < 0:
        raise ConfigError(f"--loss-tokens = {options.loss_tokens} is negative; 0 computes no loss")
    quiet.hide_library_warnings()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device = 'cuda': PyTorch sees no GPU (see 'mxtrain doctor')")
    from mxtrain.titan.hugging_face.export import export

    report = export(
        options.source,
        options.target,
        step=options.step,
        format=options.format,
        fold_gain=options.fold_gain,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        loss_tokens=options.loss_tokens,
        device=options.device,
    )
    print(report)
    return 0
