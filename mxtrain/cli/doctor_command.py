"""``mxtrain doctor``: this machine, the kernels of a shape, or what a config's model takes."""

import argparse

from mxtrain.errors import ConfigError


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="show this machine's versions, devices and execution modes, and what a config's model takes",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Print versions, devices, and which execution modes run on this machine, which mode = "auto" takes, and why.

  mxtrain doctor
  mxtrain doctor --explain-norm 32768 4096           which kernels the fused RMSNorm runs for this shape
  mxtrain doctor --explain-norm 32768 4096 --norm layer   the same for the fused LayerNorm
  mxtrain doctor --explain-router 8192 256 7168      which kernels a router's gate runs, and why
  mxtrain doctor --model CONFIG --mxnorm.p 1         a config's parameters, memory per GPU, multiplications, conversion
""",
    )
    parser.set_defaults(run=_doctor)
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        nargs=argparse.REMAINDER,  # the flags follow, which argparse does not know
        help="print only what the model of a TOML file takes; any flags of 'mxtrain train' follow",
    )
    parser.add_argument(
        "--explain-norm",
        nargs=2,
        type=int,
        metavar=("M", "N"),
        help="print only which kernels the fused RMSNorm of an M x N matrix runs here",
    )
    parser.add_argument("--norm", help="with --explain-norm: rms (RMSNorm, the default) or layer (LayerNorm)")
    parser.add_argument(
        "--explain-router",
        nargs=3,
        type=int,
        metavar=("TOKENS", "EXPERTS", "HIDDEN"),
        help="print only which kernels a router's gate runs here, and why",
    )
    parser.add_argument("--dtype", help="dtype of the matrix or gate: bfloat16 (the default), float16 or float32")


def _doctor(options) -> int:
    if options.model is not None:
        from mxtrain.cli import doctor_model

        print(doctor_model.report(options.model))
        return 0
    asked = [sizes for sizes in (options.explain_norm, options.explain_router) if sizes is not None]
    if not asked and options.dtype:
        raise ConfigError("--dtype goes with --explain-norm M N or --explain-router TOKENS EXPERTS HIDDEN")
    if options.norm and not options.explain_norm:
        raise ConfigError("--norm goes with --explain-norm M N")
    if len(asked) > 1:
        raise ConfigError("--explain-norm and --explain-router: ask for one at a time")
    from mxtrain.cli import doctor

    if not asked:
        print(doctor.report())
    else:
        explain = doctor.explain_norm if options.explain_norm else doctor.explain_router
        kind = {"norm": options.norm} if options.norm else {}
        print(explain(*asked[0], options.dtype or "bfloat16", **kind))
    return 0
