#!/usr/bin/env bash
# TorchTitan 0.3 multiplies experts in bf16 in a run that is set to float32, and rounds their weights' gradients to bf16.
#
# Versions:  torchtitan 0.3.0, torch 2.14.1, on a CPU.
# Belief:    With fp32 parameters and training.mixed_precision_param = "float32", every layer computes in fp32, so a batch
#            and the sum of its halves (two microbatches, or two processes) give gradients that agree to about 1e-6.
# Fact:      GroupedExperts converts rows and weights to bf16 itself. The gradient of every expert's weight is an fp32
#            tensor of bf16 values, and the sum of two halves is off by 0.2 %. One linear of the same size agrees to 1e-6.
# Matters:   Layouts of a mixture seem to disagree where nothing is wrong, and gradients that are accumulated in fp32 were
#            rounded once per microbatch. Compare layouts with experts that multiply in fp32.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torchtitan==0.3.0 torch==2.14.1 numpy

cat >"$folder/halves.py" <<'PYTHON'
import torch
from torchtitan.models.common.moe import GroupedExperts

EXPERTS, ROWS, DIM = 4, 128, 128
torch.manual_seed(0)
experts = GroupedExperts.Config(dim=DIM, hidden_dim=64, num_experts=EXPERTS).build()
linear = torch.nn.Linear(DIM, 64, bias=False)
for weight in (*experts.parameters(), *linear.parameters()):
    torch.nn.init.normal_(weight, std=0.1)
x = torch.randn(EXPERTS, ROWS, DIM)  # of each expert


def of_experts(rows):
    return experts(rows.flatten(0, 1), torch.tensor([rows.shape[1]] * EXPERTS))


def differences(module, forward):
    sums = []
    for parts in ((x,), x.split(ROWS // 2, dim=1)):
        module.zero_grad()
        for rows in parts:
            forward(rows).float().square().sum().backward()
        sums.append([weight.grad.clone() for weight in module.parameters()])
    return sums[0], [((a - b).norm() / a.norm()).item() for a, b in zip(*sums)]


found, errors = differences(experts, of_experts)
print(f"experts: {found[0].dtype}, off by {max(errors):.2%}, all bf16: {all((g == g.bfloat16()).all() for g in found)}")
found, errors = differences(linear, linear)
print(f"linear: {found[0].dtype}, off by {max(errors):.4%}, all bf16: {all((g == g.bfloat16()).all() for g in found)}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/halves.py" 2>"$folder/errors" | tee "$folder/seen"
if grep -qE "experts: torch.float32, off by 0\.[1-9][0-9]%, all bf16: True" "$folder/seen" &&
    grep -qE "linear: torch.float32, off by 0\.000[0-9]%, all bf16: False" "$folder/seen"; then
    echo "as found: gradients of experts are bf16 values"
else
    cat "$folder/errors"; echo "changed"; exit 1
fi
