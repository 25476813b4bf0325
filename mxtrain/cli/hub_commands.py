"""``mxtrain export``, ``import``, ``generate`` and ``eval``: runs as Hugging Face models, and back."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mxtrain.cli.console import hide_library_warnings, positive
from mxtrain.errors import ConfigError, raised_as
from mxtrain.files import os_errors_as

EXPORT = """\
Write a checkpoint of a run to a folder that Hugging Face's transformers read: safetensors, config.json and the
tokenizer. Works on a CPU, for llama3, qwen3 and deepseek_v3, as train_configs/MODELS.md says. The exported model has
RMSNorm and plain linears, whatever the run was trained with.

  mxtrain export outputs/a exported/ --step 1000 --dtype bfloat16
  mxtrain export outputs/a exported/ --fold-gain      norms have gains of one; the next weights contain them
  mxtrain export outputs/a exported/ --format mxfp8   for vLLM: the codes and scales that training multiplied in fprop

--format mxfp8, nvfp4 and mxfp4 write compressed-tensors' layouts, and fold the gains that training folded. Linears that
trained in high precision or in another format stay in --dtype.
"""
IMPORT = """\
Make a run's folder from a Hugging Face model, by transformers (pip install "mxtrain[hf]"): its weights as a checkpoint
(step 0), its tokenizer, and a config.toml with which to continue its training. Models: Llama, Qwen3 and DeepSeek V3
of any size. Without --config, the run is a short training with MXNorm on little Python source.

  mxtrain import models/Llama-3.1-8B outputs/llama --config train_configs/llama3_8b.toml
  mxtrain train outputs/llama/config.toml
"""
SOURCE = """\
RUN is a run's folder, or a Hugging Face model such as 'mxtrain export' writes. A run is exported first, to a temporary
folder; for repeated use, export it once. Needs transformers: pip install "mxtrain[hf]"."""
GENERATE = f"""\
Print a text and its continuation, word by word. As in training, the tokenizer's bos token comes first.
{SOURCE}

  mxtrain generate exported/ "import torch" --max-new-tokens 200 --temperature 0.5 --seed 1
  mxtrain generate outputs/a "def main" --step 1000 --greedy
"""
EVAL = f"""\
Print loss, perplexity and bits per byte of a model on text files (UTF-8). Every file is a document: it begins with the
tokenizer's bos token, and each of its tokens is predicted once, in windows of --seq-len tokens.
{SOURCE}

  mxtrain eval outputs/a my_code.py
  mxtrain eval exported/ texts/*.txt --seq-len 1024

To compare models with different tokenizers, use bits per byte: perplexity is per token.
"""


def add(commands) -> None:
    new = "which must be empty or not exist"
    command = _command(commands, "export", _export, "write a run's weights as a Hugging Face model", EXPORT)
    command("source", metavar="RUN", type=Path, help="folder of a run, with config.toml and checkpoints")
    command("target", metavar="DIR", type=Path, help=f"folder to write, {new}")
    command("--step", type=int, help="step of the checkpoint (default: the newest)")
    command("--format", default="hf", help="hf (high precision, the default), mxfp8, nvfp4 or mxfp4")
    command("--fold-gain", action="store_true", help="fold the gains of norms into the next linears")
    dtype = "dtype of tensors in high precision (default: float32 for hf, bfloat16 for other formats)"
    command("--dtype", choices=("float32", "bfloat16"), help=dtype)

    command = _command(commands, "import", _import, "make a run from a Hugging Face model", IMPORT)
    command("source", metavar="MODEL_DIR", type=Path, help="folder with config.json, safetensors and tokenizer")
    command("target", metavar="RUN_DIR", type=Path, help=f"folder to write, {new}")
    command("--config", dest="settings", metavar="FILE", type=Path, help="TOML file with the settings of the run")

    command = _command(commands, "generate", _generate, "continue a text with a run's weights", GENERATE)
    source, step = "folder of a run, or of a Hugging Face model", "step of the run's checkpoint (default: the newest)"
    command("source", metavar="RUN", type=Path, help=source)
    command("prompt", metavar="TEXT", help="the text to continue")
    command("--max-new-tokens", metavar="N", type=positive, default=100, help="tokens to add (default: 100)")
    command("--temperature", metavar="T", type=float, default=0.8, help="divide the logits by T (default: 0.8)")
    likeliest = "draw from the likeliest tokens with the joint probability P (default: 0.95)"
    command("--top-p", metavar="P", type=float, default=0.95, help=likeliest)
    command("--greedy", action="store_true", help="always take the likeliest token")
    command("--seed", metavar="N", type=int, help="the same seed gives the same text (default: a new one)")
    command("--step", metavar="N", type=int, help=step)

    summary = "measure perplexity and bits per byte of a run's weights on text files"
    command = _command(commands, "eval", _eval, summary, EVAL)
    command("source", metavar="RUN", type=Path, help=source)
    command("files", metavar="FILE", type=Path, nargs="+", help="text file, UTF-8")
    command("--seq-len", metavar="N", type=positive, help="tokens in a window (default: the model's longest)")
    command("--step", metavar="N", type=int, help=step)


def _command(commands, name: str, run, summary: str, description: str):
    """Add a command; return the function that adds an argument to it."""
    parser = commands.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=run)
    return parser.add_argument


def _export(options) -> int:
    hide_library_warnings()
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
    hide_library_warnings()
    import mxtrain.titan  # noqa: F401  registers the flavors
    from mxtrain.titan.hugging_face.import_model import import_model

    print(import_model(options.source, options.target, options.settings))
    return 0


def _generate(options) -> int:
    drawn = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    with _pretrained(options) as (model, tokenizer, encode):
        import torch
        from transformers import TextStreamer

        with raised_as("transformers cannot continue this text"):
            torch.seed() if options.seed is None else torch.manual_seed(options.seed)
            ids = torch.tensor([encode(options.prompt)], device=model.device)
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=options.max_new_tokens,
                pad_token_id=tokenizer.eos_token_id,
                streamer=TextStreamer(tokenizer, skip_special_tokens=True, clean_up_tokenization_spaces=False),
                **({"do_sample": False} if options.greedy else drawn),
            )
    return 0


def _eval(options) -> int:
    texts = [_read(file) for file in options.files]
    with _pretrained(options) as (model, _, encode):
        longest = model.config.max_position_embeddings
        if (seq_len := options.seq_len or longest) > longest:
            raise ConfigError(f"--seq-len = {seq_len} is too long for the model; allowed is 1 to {longest}")
        documents = [encode(text) for text in texts]
        nats = sum(_nats(model, tokens, seq_len) for tokens in documents)
    tokens, size = sum(map(len, documents)) - len(documents), sum(len(text.encode()) for text in texts)
    loss = nats / tokens
    print(f"loss        {loss:.4f} nats per token")
    print(f"perplexity  {math.exp(loss) if loss < 709 else math.inf:,.4f} per token")
    print(f"bits/byte   {nats / math.log(2) / size:.4f}")
    print(f"tokens      {tokens:,}\nbytes       {size:,}")
    return 0


def _nats(model, tokens: list[int], seq_len: int) -> float:
    """Return the summed cross entropy of all tokens after the first, in fp32, in windows of ``seq_len`` tokens.

    The last window reaches back to be as long, as ``get_rolling_token_windows`` of lm-evaluation-harness.
    """
    import torch

    total = 0.0
    for begin in range(0, len(tokens) - 1, seq_len):
        end = min(begin + seq_len, len(tokens) - 1)
        window = torch.tensor(tokens[max(0, end - seq_len) : end + 1], device=model.device)
        with torch.inference_mode():
            logits = model(window[None, :-1], use_cache=False).logits[0, begin - end :].float()
        total += torch.nn.functional.cross_entropy(logits, window[begin - end :], reduction="sum").item()
    return total


def _read(file: Path) -> str:
    try:
        with os_errors_as(f"FILE = {str(file)!r} cannot be read"):
            text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"FILE = {str(file)!r} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    if not text:
        raise ConfigError(f"FILE = {str(file)!r} is empty; give a file with text")
    return text


@contextmanager
def _pretrained(options) -> Iterator[tuple]:
    """Yield the model in the argument RUN, its tokenizer, and a function from a text to its tokens after bos."""
    hide_library_warnings()
    from mxtrain.hugging_face.text import load, require_transformers

    require_transformers()
    source = options.source
    if (source / "config.json").is_file():
        if options.step is not None:
            raise ConfigError(f"--step = {options.step} needs a run, and RUN = {str(source)!r} is a Hugging Face model")
        yield load(source)
        return
    from mxtrain.titan.hugging_face.export import export

    with os_errors_as("an export needs a temporary folder"):
        temporary = TemporaryDirectory(prefix="mxtrain-")
    with temporary as folder:
        step, _ = export(source, Path(folder, "exported"), step=options.step)
        print(f"mxtrain: exported step {step} to a temporary folder", file=sys.stderr)
        yield load(Path(folder, "exported"))
