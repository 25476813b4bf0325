"""Train a Hugging Face model with MXNorm in a plain PyTorch loop; stop, load and go on.

    python scripts/examples/plain_loop.py outputs/plain_loop --steps 20
    python scripts/examples/plain_loop.py outputs/plain_loop --steps 40     goes on after step 20

The second command gives the losses and weights of an uninterrupted run: the weights keep their names, and random bits
follow from seed and step.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mxtrain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def batch(step: int) -> torch.Tensor:
    """Return 8 rows of 64 bytes of Python source as token ids."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - 64, (8,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + 64] for start in starts]).to(DEVICE)


def train(folder: Path, steps: int) -> list[float]:
    """Train up to step ``steps``, from the model in ``folder`` if there is one. Return the loss of each step."""
    torch.manual_seed(0)
    if folder.exists():
        model = LlamaForCausalLM.from_pretrained(folder)
    else:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES))
    print(mxtrain.convert(model, recipe="nvfp4", high_precision_share=0, seed=0))
    model.to(DEVICE)
    optimizer, done = torch.optim.AdamW(model.parameters(), lr=3e-3), 0
    if folder.exists():
        state = torch.load(folder / "optimizer.pt", map_location=DEVICE)
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]

    losses = []
    for step in range(done + 1, steps + 1):
        mxtrain.set_rounding_step(step)  # stochastic rounding: the same bits whenever this step is repeated
        tokens = batch(step)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}  loss {loss.item():.4f}")

    model.save_pretrained(folder)
    torch.save({"optimizer": optimizer.state_dict(), "step": max(done, steps)}, folder / "optimizer.pt")
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the model")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    return train(options.folder, options.steps)


if __name__ == "__main__":
    main()
