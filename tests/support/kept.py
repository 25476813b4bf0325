"""What a rewrite keeps: bits, plans, losses, errors, exports and resumes of a checkout, as one JSON file.

    python -m tests.support.kept FILE           in the checkout before the rewrite, and in the one after it
    python -m tests.support.kept FILE BEFORE    the same, then print what differs from the file BEFORE

Losses and exports are equal on one kind of CPU only: write both files on the same machine.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SHORT = [
    "--training.steps=4", "--metrics.log_freq=1", "--metrics.no-enable_wandb", "--validation.no-enable",
    "--training.local_batch_size=2", "--training.seq_len=128", "--data.max_bytes=2000000",
]  # fmt: skip
SAVE = ["--checkpoint.enable", "--checkpoint.interval=2"]
WRONG = {
    "unknown preset": ["train", "llama3_dbug"],
    "unknown flag": ["train", "llama3_debug", "--mxnorm.q", "2"],
    "p": ["train", "llama3_debug", "--mxnorm.p", "3"],
    "recipe": ["train", "llama3_debug", "--mxnorm.recipe", "mxfp9"],
    "layer name": ["train", "llama3_debug", "--mxnorm.filter_fqns", "layers.99"],
    "tensor parallelism": ["train", "llama3_debug", "--parallelism.tensor_parallel_degree", "2"],
    "no run": ["train", "--resume", "no/such/run"],
    "export of no run": ["export", "no/such/run", "out"],
}


def digest(*values) -> str:
    """The first 16 digits of SHA-256 of tensors' bytes, in order."""
    total = hashlib.sha256()
    for value in values:
        total.update(value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def bits() -> dict:
    import mxtrain

    torch.manual_seed(0)
    x = torch.randn(48, 256) * torch.exp2(torch.randint(-20, 20, (48, 1)).float())
    gain, weight, dy = torch.randn(256), torch.randn(64, 256), torch.randn(48, 64)
    found = {}
    for mode in ("reference", "emulated"):
        for recipe in ("mxfp8", "nvfp4"):
            for p, estimator in ((1, "pre_round"), (2, "pre_round"), (2, "post_round"), (2, "exact")):
                if (recipe, estimator) == ("nvfp4", "post_round"):  # refused
                    continue
                norm = mxtrain.MXNorm(256, p=p, estimator=estimator, recipe=recipe, mode=mode)
                linear = mxtrain.MXNormLinear(256, 64, bias=False, recipe=recipe, mode=mode)
                with torch.no_grad():
                    norm.weight.copy_(gain), linear.weight.copy_(weight)
                a = x.clone().requires_grad_()
                y = linear(norm(a))
                y.backward(dy)
                found[f"{mode} {recipe} {p} {estimator}"] = digest(y, a.grad, norm.weight.grad, linear.weight.grad)
    found["mxnorm_cast"] = digest(*mxtrain.mxnorm_cast(x))
    found["rms_norm"] = digest(mxtrain.rms_norm(x, gain, eps=1e-5))
    found["decompose_k_mm"] = digest(mxtrain.decompose_k_mm(x, weight.t()))
    return found


def run(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "mxtrain.cli", *map(str, args)], capture_output=True, text=True)


def training(folder: Path) -> dict:
    """Losses, gradient norms and the plan of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    plan = folder / "conversion.txt"
    return {
        "losses": [[row["step"], row["loss"], row["grad_norm"]] for row in rows if "loss" in row],
        "plan": plan.read_text().splitlines() if plan.exists() else None,
    }


def main() -> None:
    file, *before = map(Path, sys.argv[1:])
    found = {"bits": bits(), "errors": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, args in WRONG.items():
            result = run(*args)
            found["errors"][what] = [result.returncode, *result.stderr.strip().splitlines()[-2:]]
        for preset in sorted(path.stem for path in (ROOT / "train_configs").glob("*_debug*.toml")):
            save = (
                SAVE if preset in ("llama3_debug", "llama3_debug_nvfp4", "qwen3_debug") else ["--checkpoint.no-enable"]
            )
            result = run("train", preset, *SHORT, *save, "--job.dump_folder", folder / preset)
            found[preset] = training(folder / preset) if result.returncode == 0 else result.stderr[-2000:]
            print(preset, flush=True)
        run("train", "--resume", folder / "llama3_debug", "--training.steps", 6)
        found["resumed"] = training(folder / "llama3_debug")["losses"]
        for preset, form in (("llama3_debug", "hf"), ("qwen3_debug", "mxfp8"), ("llama3_debug_nvfp4", "nvfp4")):
            run("export", folder / preset, folder / f"{preset}-{form}", "--format", form)
            weights = sorted((folder / f"{preset}-{form}").glob("*.safetensors"))
            found[f"export {form}"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights}
    file.write_text(json.dumps(found, indent=1))
    if before:
        earlier = json.loads(before[0].read_text())
        for key in sorted(found.keys() | earlier.keys()):
            if found.get(key) != earlier.get(key):
                print(f"{key} differs:\n  before {earlier.get(key)}\n  after  {found.get(key)}")


if __name__ == "__main__":
    main()
