"""Train a Hugging Face model with MXNorm in ``transformers.Trainer``; stop, load and go on.

    python scripts/examples/hugging_face_trainer.py outputs/trainer --steps 20
    python scripts/examples/hugging_face_trainer.py outputs/trainer --steps 40     goes on after step 20

The model of the last step is in ``FOLDER/model``, and loads with ``from_pretrained`` with or without mxtrain.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import mxtrain

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


class RoundingStep(TrainerCallback):
    """Tells stochastic rounding the step and the microbatch, so that a resumed run repeats their random bits."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.microbatch = 0
        mxtrain.set_rounding_step(state.global_step + 1)

    def on_substep_end(self, args, state, control, **kwargs):
        self.microbatch += 1
        mxtrain.set_rounding_step(state.global_step + 1, self.microbatch)


def dataset() -> list[dict[str, torch.Tensor]]:
    """Return rows of 64 bytes of Python source as token ids."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in text[: len(text) // 64 * 64].view(-1, 64)]


def train(folder: Path, steps: int) -> list[dict]:
    """Train up to step ``steps``, from the last checkpoint in ``folder`` if there is one. Return the Trainer's log."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES))
    print(mxtrain.convert(model, recipe="nvfp4", high_precision_share=0, seed=0))  # before the Trainer takes it

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=10,
        bf16=torch.cuda.is_available(),
        report_to="none",
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset(), callbacks=[RoundingStep()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)
    model.save_pretrained(folder / "model")
    return trainer.state.log_history


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the checkpoints and the model")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    return train(options.folder, options.steps)


if __name__ == "__main__":
    main()
