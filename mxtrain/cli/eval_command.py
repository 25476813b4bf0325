"""``mxtrain eval``: loss, perplexity and bits per byte of a run's weights on text files."""

import argparse
from pathlib import Path

from mxtrain.cli import quiet


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "eval",
        help="perplexity and bits per byte of a run's weights on text files",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Print loss, perplexity and bits per byte of a model on text files (UTF-8), by transformers (pip install "mxtrain[hf]").
RUN is a run's folder, or a Hugging Face model such as 'mxtrain export' writes. A run is exported first, to
RUN/exported/step-N, once for each checkpoint.

  mxtrain eval outputs/llama3_debug-20261120-131838 my_code.py
  mxtrain eval exported/ texts/*.txt --seq-len 1024 --stride 256
  mxtrain eval outputs/a book.txt --max-tokens 100000

Every file is a document: it begins with the tokenizer's bos token, and each of its tokens is predicted once. Files
that are longer than --seq-len are read in windows. The first window predicts --seq-len tokens, every later one the next
--stride tokens from as much context as fits. By default the stride is --seq-len, as in lm-evaluation-harness.

  perplexity     e to the loss in nats per token; models with other tokenizers do not compare
  bits per byte  loss in bits, summed over all tokens, by the bytes of the text; models with other tokenizers compare
""",
    )
    parser.set_defaults(run=_eval)
    parser.add_argument("source", metavar="RUN", type=Path, help="folder of a run, or of a Hugging Face model")
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="text file, UTF-8")
    parser.add_argument("--seq-len", metavar="N", type=int, help="tokens in a window (default: the model's longest)")
    parser.add_argument("--stride", metavar="N", type=int, help="tokens that a window predicts (default: --seq-len)")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="stop after so many tokens (default: read all)")
    parser.add_argument("--step", metavar="N", type=int, help="step of the run's checkpoint (default: the newest)")


def _eval(options) -> int:
    quiet.hide_library_warnings()
    from mxtrain.cli.model_folder import model_folder
    from mxtrain.hugging_face.evaluation import Reading, evaluate, read_texts
    from mxtrain.hugging_face.pretrained import load, require_transformers

    # Mistakes show before the slow export.
    reading = Reading(options.seq_len, options.stride, options.max_tokens)
    require_transformers()
    texts = read_texts(options.files)
    print(evaluate(load(model_folder(options.source, options.step)), texts, reading))
    return 0
