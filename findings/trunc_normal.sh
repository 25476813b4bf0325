#!/usr/bin/env bash
# torch.nn.init.trunc_normal_ draws other weights from the same seed since PyTorch 2.12.
#
# Versions:  torch 2.11.0 and 2.12.1, on a CPU (2.11.0 and 2.14.1 differ in the same way on an H200).
# Belief:    one seed gives one model on one kind of device, as long as the code of the model stays the same.
#            normal_ and uniform_ do keep their numbers.
# Fact:      2.11 transforms one uniform number per element with the inverse error function. 2.12 draws normal numbers
#            and draws again where one lies outside the bounds. Every value differs; and where the bounds cut (three
#            standard deviations here), the generator advances further, so that all later tensors differ, too.
# Matters:   TorchTitan and others initialize linear layers with trunc_normal_. Runs before and after an upgrade are not
#            paired by their seed: the first loss of a small Llama 3 model moves from 8.197 to 8.063 nats.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

cat >"$folder/draw.py" <<'PYTHON'
import hashlib

import torch


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:12]


def drawn(fill, *args, **kwargs):
    """The digests of one filled tensor, and of what the generator gives afterwards."""
    torch.manual_seed(7)
    tensor = fill(torch.empty(768, 768), *args, **kwargs)
    return f"{digest(tensor)} {digest(torch.rand(4))}"


print("normal", drawn(torch.nn.init.normal_))
print("uniform", drawn(torch.nn.init.uniform_))
print("trunc_normal", drawn(torch.nn.init.trunc_normal_, std=0.02))
print("cut_at_3_std", drawn(torch.nn.init.trunc_normal_, std=0.02, a=-0.06, b=0.06))
PYTHON

for version in 2.11.0 2.12.1; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install -q "torch==$version" numpy
    "$folder/$version/bin/python" "$folder/draw.py" >"$folder/$version.txt"
    echo "torch $version: digests of the tensor, and of four numbers drawn after it"
    cat "$folder/$version.txt"
done

field() { awk -v name="$2" -v column="$3" '$1 == name { print $column }' "$folder/$1.txt"; }
same() { [ "$(field 2.11.0 "$1" "$2")" = "$(field 2.12.1 "$1" "$2")" ]; }
if same normal 2 && same uniform 2 && same trunc_normal 3 && ! same trunc_normal 2 && ! same cut_at_3_std 3; then
    echo "as found: trunc_normal_ differs, and what follows it where the bounds cut"
else
    echo "changed"
    exit 1
fi
