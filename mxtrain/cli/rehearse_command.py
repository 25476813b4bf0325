"""``mxtrain rehearse``: which recipe a model's layers would take, measured before it is trained."""

from pathlib import Path

from mxtrain.cli.console import hide_library_warnings, positive
from mxtrain.errors import ConfigError


def add(commands) -> None:
    parser = commands.add_parser(
        "rehearse",
        help="measure the errors of every recipe in every layer of a model",
        description="""\
Run one batch through a run's newest checkpoint, or through the new model of a config, in high precision. Cast and
multiply a sample of every layer's tensors as each recipe would, and print the relative errors of fprop, dgrad and
wgrad. The folder gets all errors (errors.csv), a heat map of layers by recipes (errors.png), and a TOML table with
every layer's cheapest recipe within the bound (recipes.toml).

  mxtrain rehearse outputs/a --step 1000 --bound 0.03
  mxtrain rehearse llama3_125m -o rehearsal/

The sample is the first mxnorm.diagnostics.tokens of the training text (default: 512).
""",
    )
    parser.set_defaults(run=_rehearse)
    parser.add_argument("source", metavar="RUN", type=Path, help="a run's folder, a TOML file, or the name of a preset")
    parser.add_argument("--bound", metavar="B", type=float, default=0.05, help="largest error (default: 0.05)")
    parser.add_argument("--step", metavar="N", type=positive, help="step of the checkpoint (default: the newest)")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help="folder (default: rehearsal/ in RUN)")


def _rehearse(options) -> int:
    if not 0 < options.bound < 1:
        raise ConfigError(f"--bound = {options.bound} is not between 0 and 1")
    hide_library_warnings()
    import mxtrain.titan  # noqa: F401  registers the models
    from mxtrain.titan.rehearse import rehearse

    print(rehearse(options.source, options.output, options.bound, options.step))
    return 0
