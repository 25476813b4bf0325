"""Checkpoints of a training run: written, verified, resumed."""
