"""Passes over the graphs that torch.compile makes of a training step."""
