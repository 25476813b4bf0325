"""The shipped certificate, replays on kernels, changed codes, scales, random bits and products, and damaged files."""

import json

import pytest
import torch

from mxtrain.cli.certify import CASES, E5M2, MIXED
from mxtrain.diagnostics import certificate
from mxtrain.diagnostics.certificate import REFERENCE, SHIPPED, Target, certified, read, replay, targets, write
from mxtrain.errors import ConfigError
from mxtrain.formats.mx import ops as mx_ops
from mxtrain.formats.nvfp4 import ops as nvfp4_ops
from mxtrain.formats.ops import FormatOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where kernels run in Triton's interpreter
KERNELS = [Target("emulated", DEVICE), Target("native", DEVICE, False)]
LAYER, EXPERTS = dict(shape=(64, 96, 64)), dict(shape=(50, 64, 32), counts=(27, 0, 23))
NORMS = [dict(p=p, estimator=estimator) for p, estimator in ((2, "pre_round"), (1, "pre_round"), (2, "exact"))]
CASTS, PRODUCTS = Target("reference", "cpu", False), Target("emulated", "cpu")


def differences(case, on):
    return {name: wrong for name, _, wrong in replay(case, on) if wrong}


def test_the_shipped_file_is_what_this_checkout_writes(tmp_path):
    write(tmp_path / "new.json", [certified(**case) for case in CASES])
    same = (tmp_path / "new.json").read_bytes() == SHIPPED.read_bytes()
    assert same, "run: mxtrain certify --write mxtrain/diagnostics/certificate.json"


def test_the_shipped_certificate_holds_on_this_machine():
    on = targets()
    for case in read(SHIPPED):
        assert not differences(case, on)


def test_all_operands_and_products_of_all_targets_are_compared():
    case = certified("mxfp8", **LAYER)
    torchao = Target("torchao", "cpu", False)
    compared = {name: agree for name, agree, _ in replay(case, [REFERENCE, torchao, KERNELS[1]])}
    assert len(compared) == 9
    for name, agree in compared.items():
        of_kernels = [] if name in case["bounds"] else [str(torchao), str(KERNELS[1])]
        assert agree == [str(REFERENCE), *of_kernels], name
    assert {"codes", "scales", "values", "blocked scales"} == set(case["operands"]["wgrad X"])
    assert {"tensor scale"} < set(certified(MIXED, **LAYER)["operands"]["fprop W"])


@pytest.mark.parametrize(
    "recipe, settings",
    [
        (MIXED, LAYER | {"norm": NORMS[0]}),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                *((recipe, LAYER) for recipe in ("mxfp8_2d", E5M2, "nvfp4", "nvfp4_row", "nvfp4_4over6", "mxfp4")),
                *((recipe, LAYER | {"norm": norm}) for recipe in ("mxfp8", "nvfp4") for norm in NORMS),
                *((recipe, LAYER | {"norm": NORMS[0]}) for recipe in ("nvfp4_row", "nvfp4_4over6")),
                *((recipe, EXPERTS) for recipe in ("mxfp8", "mxfp8_2d", "nvfp4", MIXED)),
            )
        ),
    ],
)
def test_kernels_agree(recipe, settings):
    assert not differences(certified(recipe, **settings), [REFERENCE, *KERNELS])


def break_native_cast(monkeypatch, tensor):
    """Change one bit of codes (0) or scales (1) of the cast along tokens of kernels that write codes."""
    cast = mx_ops.kernels.cast

    def broken(parts, recipe, dims, form, *others):
        found = cast(parts, recipe, dims, form, *others)
        if form == "blocked" and dims == (0,):
            found[0][tensor].view(torch.uint8).view(-1)[70] ^= 1
        return found

    monkeypatch.setattr(mx_ops.kernels, "cast", broken)


@pytest.mark.parametrize("tensor, element", [(0, "codes [1, 6]"), (1, "blocked scales [70]")])
def test_a_changed_code_or_scale_is_named(monkeypatch, tensor, element):
    case = certified("mxfp8", **LAYER)
    break_native_cast(monkeypatch, tensor)
    found = differences(case, [REFERENCE, KERNELS[1]])
    assert found.keys() == {"wgrad X"}
    (line,) = found["wgrad X"]
    assert line.startswith(f"{KERNELS[1]}: {element} is 0x") and ", not 0x" in line


def replay_with(monkeypatch, case, target, owner, name, function):
    """Differences of a target for which a function is another one."""
    run = certificate._run

    def of_target(case, target):
        with monkeypatch.context() as patch:
            if target != REFERENCE:
                patch.setattr(owner, name, function)
            return run(case, target)

    monkeypatch.setattr(certificate, "_run", of_target)
    return differences(case, [REFERENCE, target])


def test_a_changed_random_bit_is_named(monkeypatch):
    case = certified("nvfp4", shape=(32, 32, 32))
    words = certificate.rounding_words

    def changed(*args, device):
        found = words(*args, device=device)
        if len(args) == 6:  # with a microbatch: not an input
            found[2, 3] ^= 1
        return found

    found = replay_with(monkeypatch, case, CASTS, certificate, "rounding_words", changed)
    assert found.keys() == {"random bits"}
    assert found["random bits"][0].startswith("reference casts (cpu): words [2, 3] is 0x")


def test_other_random_bits_of_a_cast_are_named(monkeypatch):
    case = certified("nvfp4", shape=(32, 32, 32))
    words = nvfp4_ops.rounding_words
    changed = (nvfp4_ops, "rounding_words", lambda *args: words(*args) ^ 0x80008000)
    found = replay_with(monkeypatch, case, CASTS, *changed)
    assert found.keys() == {"dgrad dY", "wgrad dY"}
    assert all(line.startswith("reference casts (cpu): codes") for line in (of[0] for of in found.values()))


@pytest.mark.parametrize("factor", [1 + 2.0**-6, float("nan")])
def test_a_wrong_product_is_named(monkeypatch, factor):
    case = certified("mxfp8", **LAYER)
    matmul = FormatOps.matmul

    def wrong(self, a, b, dtype):
        y = matmul(self, a, b, dtype)
        largest = y.abs().argmax()
        y.view(-1)[largest] *= factor
        return y

    found = replay_with(monkeypatch, case, PRODUCTS, FormatOps, "matmul", wrong)
    assert found.keys() == {"fprop Y", "dgrad dX", "wgrad dW"}
    assert all(line.startswith("emulated (cpu): [") and " +- " in line for (line,) in found.values())


def test_a_product_that_fails_is_a_difference(monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel\nfor this")

    found = replay_with(monkeypatch, certified("mxfp8", **LAYER), PRODUCTS, FormatOps, "matmul", fail)
    assert found["fprop Y"] == ["emulated (cpu): failed: no kernel for this"]


def test_a_certificate_that_differs_from_the_reference():
    case = certified("mxfp8", **LAYER)
    case["operands"]["dgrad W"]["scales"] = "0" * 32
    case["bounds"]["wgrad dW"] *= 2
    found = differences(case, [REFERENCE])
    assert found.keys() == {"dgrad W", "wgrad dW"}
    assert found["dgrad W"][0].startswith("reference (cpu): scales [96, 2] have the hash ")
    assert found["wgrad dW"][0].startswith("the bound is ")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text[:-100], "is not valid JSON: "),
        (
            lambda text: text.replace('"signs": ', '"signs": 1', 1),
            "is damaged: its content does not match its checksum",
        ),
        (
            lambda text: text.replace('"version": 1', '"version": 2'),
            "is a certificate of version 2; this mxtrain reads",
        ),
        (lambda text: json.dumps({}), "is a certificate of version None"),
        (lambda text: "[]", "holds list, not dict"),
    ],
)
def test_files_that_are_refused(tmp_path, change, message):
    path = tmp_path / "certificate.json"
    path.write_text(change(SHIPPED.read_text()))
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value).startswith(f"{path} {message}") and "\n" not in str(error.value)
