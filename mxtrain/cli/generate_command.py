"""``mxtrain generate``: continue a text with a run's weights."""

import argparse
from pathlib import Path

from mxtrain.cli import quiet
from mxtrain.errors import ConfigError


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "generate",
        help="continue a text with a run's weights",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Print a text and its continuation, word by word, by transformers (pip install "mxtrain[hf]"). RUN is a run's folder, or
a Hugging Face model such as 'mxtrain export' writes. A run is exported first, to RUN/exported/step-N, once for each
checkpoint. The text begins as documents in training do, with the tokenizer's bos token.

  mxtrain generate outputs/llama3_debug-20261120-131838 "def main"
  mxtrain generate exported/ "import torch" --max-new-tokens 200 --temperature 0.5 --seed 1
  mxtrain generate outputs/a "def main" --step 1000 --greedy
""",
    )
    parser.set_defaults(run=_generate)
    parser.add_argument("source", metavar="RUN", type=Path, help="folder of a run, or of a Hugging Face model")
    parser.add_argument("prompt", metavar="TEXT", help="the text to continue")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, help="tokens to add (default: 100, or as fit)")
    parser.add_argument("--temperature", metavar="T", type=float, help="divides the logits (default: 0.8)")
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        help="draw from the likeliest tokens of this joint probability (default: 0.95)",
    )
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument("--seed", metavar="N", type=int, help="the same seed gives the same text (default: a new one)")
    parser.add_argument("--step", metavar="N", type=int, help="step of the run's checkpoint (default: the newest)")


def _generate(options) -> int:
    names = ("temperature", "top_p", "seed", "max_new_tokens")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.greedy and (drawing := [name for name in given if name != "max_new_tokens"]):
        raise ConfigError(f"--greedy draws nothing: it does not go with --{drawing[0].replace('_', '-')}")
    try:
        options.prompt.encode("utf-8")
    except UnicodeEncodeError as error:  # Python keeps bytes of an argument that are not UTF-8 as lone surrogates
        raise ConfigError(
            f"TEXT = {options.prompt!r} is not UTF-8 text: character {error.start} is wrong; give it in UTF-8"
        ) from error
    quiet.hide_library_warnings()
    from mxtrain.cli.model_folder import model_folder
    from mxtrain.hugging_face.generation import Sampling, generate
    from mxtrain.hugging_face.pretrained import load, require_transformers

    # Mistakes show before the slow export.
    sampling = Sampling(greedy=options.greedy, **given)
    require_transformers()
    pretrained = load(model_folder(options.source, options.step))
    generate(pretrained, options.prompt, sampling)
    return 0
