"""``mxtrain export``, ``import``, ``generate`` and ``eval``: runs as Hugging Face models, and back."""

import math
import sys
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from mxtrain.cli import quiet
from mxtrain.cli.path_parser import positive
from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as, reason
from mxtrain.run_folder.files import CONFIG_FILE

MODEL_FILE = "config.json"

EXPORT = """\
Write a checkpoint of a run to a folder that Hugging Face's transformers read: safetensors, config.json,
generation_config.json and the tokenizer. Works on a CPU, for checkpoints of any number of processes, and reads one
weight after another. Models: llama3, qwen3 and deepseek_v3, as train_configs/MODELS.md says. The exported model has
RMSNorm and plain linears, whatever the run was trained with. 'mxtrain eval' computes its loss.

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
GENERATE = """\
Print a text and its continuation, word by word, by transformers (pip install "mxtrain[hf]"). RUN is a run's folder, or
a Hugging Face model such as 'mxtrain export' writes. A run is exported first, to a temporary folder; export it yourself
to use it often. The text begins as documents in training do, with the tokenizer's bos token.

  mxtrain generate outputs/llama3_debug-20261120-131838 "def main"
  mxtrain generate exported/ "import torch" --max-new-tokens 200 --temperature 0.5 --seed 1
  mxtrain generate outputs/a "def main" --step 1000 --greedy
"""
EVAL = """\
Print loss, perplexity and bits per byte of a model on text files (UTF-8), by transformers (pip install "mxtrain[hf]").
RUN is a run's folder, or a Hugging Face model such as 'mxtrain export' writes. A run is exported first, to a temporary
folder; export it yourself to use it often.

  mxtrain eval outputs/llama3_debug-20261120-131838 my_code.py
  mxtrain eval exported/ texts/*.txt --seq-len 1024 --stride 256
  mxtrain eval outputs/a book.txt --max-tokens 100000

Every file is a document: it begins with the tokenizer's bos token, and each of its tokens is predicted once. Files
that are longer than --seq-len are read in windows. The first window predicts --seq-len tokens, every later one the next
--stride tokens from as much context as fits. By default the stride is --seq-len, as in lm-evaluation-harness.

  perplexity     e to the loss in nats per token; models with other tokenizers do not compare
  bits per byte  loss in bits, summed over all tokens, by the bytes of the text; models with other tokenizers compare
"""


def add(commands) -> None:
    """Add the four commands to argparse's subcommands."""
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

    command = _command(commands, "generate", _generate, "continue a text with a run's weights", GENERATE)
    command("source", metavar="RUN", type=Path, help="folder of a run, or of a Hugging Face model")
    command("prompt", metavar="TEXT", help="the text to continue")
    command("--max-new-tokens", metavar="N", type=positive, help="tokens to add (default: 100, or as fit)")
    command("--temperature", metavar="T", type=float, help="divides the logits (default: 0.8)")
    likeliest = "draw from the likeliest tokens of this joint probability (default: 0.95)"
    command("--top-p", metavar="P", type=float, help=likeliest)
    command("--greedy", action="store_true", help="always take the likeliest token")
    command("--seed", metavar="N", type=int, help="the same seed gives the same text (default: a new one)")
    command("--step", metavar="N", type=int, help="step of the run's checkpoint (default: the newest)")

    summary = "perplexity and bits per byte of a run's weights on text files"
    command = _command(commands, "eval", _eval, summary, EVAL)
    command("source", metavar="RUN", type=Path, help="folder of a run, or of a Hugging Face model")
    command("files", metavar="FILE", type=Path, nargs="+", help="text file, UTF-8")
    command("--seq-len", metavar="N", type=positive, help="tokens in a window (default: the model's longest)")
    command("--stride", metavar="N", type=positive, help="tokens that a window predicts (default: --seq-len)")
    command("--max-tokens", metavar="N", type=positive, help="stop after so many tokens (default: read all)")
    command("--step", metavar="N", type=int, help="step of the run's checkpoint (default: the newest)")


def _command(commands, name: str, run, summary: str, description: str):
    """Add a command; return the function that adds an argument to it."""
    parser = commands.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=run)
    return parser.add_argument


def _export(options) -> int:
    quiet.hide_library_warnings()
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
    quiet.hide_library_warnings()
    import mxtrain.titan  # noqa: F401  registers the flavors
    from mxtrain.titan.hugging_face.import_model import import_model

    print(import_model(options.source, options.target, options.settings))
    return 0


def _generate(options) -> int:
    drawing = {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
    given = {name: value for name, value in drawing.items() if value is not None}
    if options.greedy and given:
        raise ConfigError(f"--greedy draws nothing: it does not go with --{next(iter(given)).replace('_', '-')}")
    temperature, top_p, seed = given.get("temperature", 0.8), given.get("top_p", 0.95), given.get("seed", 0)
    for name, value, is_right, problem in (
        ("temperature", temperature, 0 < temperature < math.inf, "a positive number; --greedy stands for 0"),
        ("top-p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("seed", seed, 0 <= seed < 2**63, "an integer from 0 to 2^63 - 1"),
    ):
        if not is_right:
            raise ConfigError(f"--{name} = {value} is not {problem}")
    # Python keeps bytes of an argument that are not UTF-8 as lone surrogates.
    if options.prompt != options.prompt.encode(errors="replace").decode():
        raise ConfigError(f"TEXT = {options.prompt!r} is not UTF-8 text; give it in UTF-8")
    # transformers' default top_k = 50 would be a second limit.
    drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    sampling = {"do_sample": False} if options.greedy else drawn
    with _pretrained(options) as pretrained:
        from mxtrain.hugging_face.text import generate

        generate(pretrained, options.prompt, max_new_tokens=options.max_new_tokens, seed=options.seed, **sampling)
    return 0


def _eval(options) -> int:
    numbers = {name: getattr(options, name) for name in ("seq_len", "stride", "max_tokens")}
    texts = [_read(file) for file in options.files]
    with _pretrained(options) as pretrained:
        from mxtrain.hugging_face.text import evaluate

        print(evaluate(pretrained, texts, **numbers))
    return 0


def _read(file: Path) -> str:
    """Read a text file. Raises ConfigError if it cannot be read, is empty or is not UTF-8."""
    try:
        with os_errors_as(f"FILE = {str(file)!r} cannot be read"):
            text = StringIO(file.read_bytes().decode("utf-8-sig"), newline=None).read()  # as training reads it
    except UnicodeDecodeError as error:
        raise ConfigError(f"FILE = {str(file)!r} is not UTF-8 text: byte {error.start} is wrong") from error
    if not text:
        raise ConfigError(f"FILE = {str(file)!r} is empty")
    return text


@contextmanager
def _pretrained(options):
    """Yield the model in the argument RUN, which is a model's folder or a run, exported to a temporary folder in fp32.

    Raises:
        ConfigError: RUN is neither of the two, cannot be exported or loaded, or a step of a model is asked for.
    """
    quiet.hide_library_warnings()
    from mxtrain.hugging_face.text import load, require_transformers

    require_transformers()
    source, where = options.source, f"RUN = {str(options.source)!r}"
    if (source / MODEL_FILE).is_file():
        if options.step is not None:
            raise ConfigError(f"--step = {options.step}: {where} is a Hugging Face model, which has no steps")
        yield load(source)
        return
    if not (source / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{where} is neither a run ({CONFIG_FILE} is missing) nor a Hugging Face model ({MODEL_FILE} is missing)"
        )
    from mxtrain.titan.hugging_face.export import export

    try:
        temporary_folder = TemporaryDirectory(prefix="mxtrain-")
    except OSError as error:
        raise ConfigError(f"{where} needs a temporary folder for its export: {reason(error)}; set TMPDIR") from error
    with temporary_folder as temporary:
        folder = Path(temporary, "exported")
        step, _ = export(source, folder, step=options.step)
        print(f"mxtrain: exported step {step} to a temporary folder", file=sys.stderr)
        yield load(folder)
