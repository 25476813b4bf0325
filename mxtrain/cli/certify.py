"""``mxtrain certify``: whether this machine casts and multiplies as the machine that wrote a certificate."""

import os
from pathlib import Path

from mxtrain.cli.console import hide_library_warnings

# (tokens, input features, output features), also in incomplete tiles of block scales.
LAYER, EXPERTS = dict(shape=(256, 384, 224)), dict(shape=(200, 256, 128), counts=(57, 0, 143))
E5M2, MIXED = "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2", "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8"
DEQUANTIZED = "fprop=mxfp8, dgrad=dequantized, wgrad=dequantized"
NORMS = [dict(p=p, estimator=estimator) for p, estimator in ((2, "pre_round"), (1, "pre_round"), (2, "exact"))]
NORMED = ("mxfp8", NORMS), ("nvfp4", NORMS), ("nvfp4_row", NORMS[:1]), ("nvfp4_4over6", NORMS[:1])
LINEARS = ("mxfp8", "mxfp8_2d", E5M2, "nvfp4", "nvfp4_row", "nvfp4_4over6", "mxfp4", MIXED, DEQUANTIZED)
CASES = [dict(recipe=recipe, **LAYER) for recipe in LINEARS]
CASES += [dict(recipe=recipe, norm=norm, **LAYER) for recipe, norms in NORMED for norm in norms]
CASES += [dict(recipe=recipe, **EXPERTS) for recipe in ("mxfp8", "mxfp8_2d", "nvfp4", MIXED)]
"""What the certificate of mxtrain covers: arguments of ``mxtrain.diagnostics.certificate.certified``"""


def add(commands) -> None:
    parser = commands.add_parser(
        "certify",
        help="check the casts and products of this machine against a certificate",
        description="""\
Cast the operands and compute the products of small layers, in the modes reference, emulated and native that this
machine has, and compare them with a certificate: operands bit for bit, products within the bound of fp32 sums. Exit
with status 1 if any differs.

  mxtrain certify                  the certificate of mxtrain
  mxtrain certify FILE             another one
  mxtrain certify --write FILE     write the certificate of mxtrain anew, on the CPU
""",
    )
    parser.set_defaults(run=_certify)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("file", metavar="FILE", nargs="?", type=Path, help="a certificate (default: that of mxtrain)")
    either.add_argument("--write", metavar="FILE", type=Path, help="write a certificate")


def _certify(options) -> int:
    hide_library_warnings()
    from mxtrain.analysis.tables import titled
    from mxtrain.cli.doctor import devices, versions
    from mxtrain.diagnostics.certificate import REFERENCE, SHIPPED, certified, read, replay_all, targets, write

    if options.write:
        write(options.write, [certified(**case) for case in CASES])
        print(f"certificate: {options.write}")
        return 0
    cases, on, differences = read(options.file or SHIPPED), targets(), 0
    print(titled("versions", versions()), titled("devices", devices()), sep="\n\n")
    # The kernels of a GPU take a minute of one core to compile.
    has_gpu = any(target.device != REFERENCE.device for target in on)
    for case, found in zip(cases, replay_all(cases, on, min(16, os.cpu_count() or 1) if has_gpu else 1)):
        print(f"\n{case['name']}")
        for name, agree, wrong in found:
            verdict = "within the bound" if name in case["bounds"] else "equal"
            lines = [f"{verdict}: {', '.join(agree)}"] * bool(agree) + wrong
            print(*(f"  {name:<12} {line}" for line in lines), sep="\n", flush=True)
            differences += len(wrong)
    print(f"\n{len(cases)} cases on {', '.join(map(str, on))}: {differences or 'no'} differences")
    return int(differences > 0)
